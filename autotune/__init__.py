"""`autotune`: keeps an LLM reinforcement-learning run healthy and fast by itself."""

__version__ = "0.1.0"
