"""Search for the weights of composed policies: methods with a fixed budget, a resumable log, held-out evaluation."""
