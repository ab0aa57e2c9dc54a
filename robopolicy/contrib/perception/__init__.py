"""Learned masks that reduce a camera policy's reliance on single image regions."""
