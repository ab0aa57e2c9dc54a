"""Rollouts of text policies: prompts, strategies, the collector and the queue of asynchronous workers."""
