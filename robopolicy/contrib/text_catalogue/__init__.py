"""Published methods that train text policies: 112 recipes, and the parts that only these recipes name."""
