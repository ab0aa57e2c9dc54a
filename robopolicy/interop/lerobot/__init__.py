"""Policies of the LeRobot package as ours and ours as theirs; its datasets are read and written by `data.lerobot`.

    policy = loading.load_lerobot("lerobot/diffusion_pusht")  # or a folder; act and decode, field where it diffuses
    theirs = adapter.as_lerobot(policy)  # select_action, predict_action_chunk

Tested with the releases that the extra `robopolicy[lerobot]` allows. Nothing here imports `lerobot` before it is used.
"""
