"""Ways to reach a robot, behind the one interface of `base`; a module each, imported when it is opened."""
