"""Built-in tasks, one folder a family. Importing this package imports no simulator."""


def register_tasks() -> None:
    """Entry point `robopolicy.tasks`: register every family."""
    from tasks import toy

    toy.register()
