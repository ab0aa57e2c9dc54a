"""Parts that several algorithms share."""
