"""Simulator wrappers that add observations or change rewards; chosen by name in `task.wrappers`."""
