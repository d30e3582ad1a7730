"""TRL's GRPOTrainer: what is read, what is set, which versions were tested (`declared`)."""
