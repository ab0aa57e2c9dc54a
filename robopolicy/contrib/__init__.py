"""Published methods around the product, found by name."""
