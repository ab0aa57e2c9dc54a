"""Training from scratch at the budget of the field, one million environment steps."""
