"""Code that several algorithms share."""
