"""Policies trained through known, differentiable dynamics or their linear plans."""
