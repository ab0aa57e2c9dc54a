"""Native batched MuJoCo: tasks as numpy functions, two physics engines, a fast CPU renderer."""
