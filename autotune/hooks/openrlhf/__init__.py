"""The control loop in OpenRLHF's synchronous PPO trainer, by a launcher in the place of OpenRLHF's own.

__main__    `python -m autotune.hooks.openrlhf control.yaml …`: puts our subclass in, then runs theirs
trainer     OpenRLHF's trainer class with the control loop before its logger and its checkpoint
adapter     what the control loop sees: OpenRLHF's keys and knobs by our names
workers     what is run inside OpenRLHF's model actors, to set and to read back
declared    the table for docs/integrations.md
"""
