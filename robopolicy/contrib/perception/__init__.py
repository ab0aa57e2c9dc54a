"""Learned masks that cover what a camera policy should not rely on."""
