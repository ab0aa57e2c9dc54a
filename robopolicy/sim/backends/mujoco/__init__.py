"""Native batched MuJoCo: tasks as array functions, two CPU engines and MuJoCo Warp, a fast CPU renderer."""
