"""Camera observations of many worlds by MuJoCo Warp's ray tracer, on the device of the physics.

The scene has the cameras, lights, headlight, materials and sky of the native `Renderer`, without shadows.
Unlike OpenGL, a texture is not blurred with distance, transparent geoms are opaque, and sites are not drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import mujoco
import numpy as np
import torch
from torch import Tensor

from robopolicy.errors import unknown_name
from robopolicy.nets.encoder import CLOUD_PREFIX, IMAGE_PREFIX
from robopolicy.sim.backends.mujoco.task import MujocoTask
from robopolicy.sim.backends.warp_physics import import_packages, recorded
from robopolicy.sim.contract import Observation
from robopolicy.sim.point_cloud import DEPTH_SIZE, unproject

_DRAWN_GROUPS = [0, 1, 2]  # of geoms, as in `mujoco.MjvOption`
_NO_RGBA = (0.5, 0.5, 0.5, 1.0)  # of a geom that sets no colour


class WarpCameras:
    """Images and point clouds of N states of one task.

    It has its own model and positions, so that it neither reads nor changes the physics.
    """

    def __init__(
        self,
        task: MujocoTask,
        count: int,  # N
        device: torch.device,
        *,
        cameras: Sequence[str],  # for observations `image.<camera>`
        image_size: int,  # height and width in pixels
        point_clouds: Sequence[str],  # for observations `point_cloud.<camera>`
        points: int,  # of each cloud
    ) -> None:
        warp, mujoco_warp = import_packages()
        for camera in (*cameras, *point_clouds):
            if camera not in task.cameras:
                raise unknown_name("camera", camera, task.cameras, f"of task {task.name}")
        model = _drawn_model(task.model)
        self._qpos = torch.zeros(count, model.nq, device=device)
        self._images: dict[str, Tensor] = {}  # packed colours (N, size, size, 4) uint8: blue, green, red, alpha
        self._clouds: dict[str, Tensor] = {}  # (N, points, 3) [m]
        work: list[Callable[[], Any]] = []

        def tracer(names: Sequence[str], size: int, *, depth: bool) -> Any:
            """Ray tracer of the cameras `names`, in the order of the model."""
            context = mujoco_warp.create_render_context(
                model,
                count,
                cam_res=(size, size),
                render_rgb=not depth,
                render_depth=depth,
                render_seg=False,
                cam_active=[model.camera(i).name in names for i in range(model.ncam)],
                enabled_geom_groups=_DRAWN_GROUPS,
                render_skybox=True,
            )
            work.append(lambda: mujoco_warp.refit_bvh(on_device, data, context))
            work.append(lambda: mujoco_warp.render(on_device, data, context))
            return context

        with warp.ScopedDevice(warp.device_from_torch(device)):
            on_device = mujoco_warp.put_model(model)
            data = mujoco_warp.make_data(model, nworld=count, nconmax=1, njmax=1)
            data.qpos = warp.from_torch(self._qpos)
            if cameras:
                names = _in_model_order(model, cameras)
                colours = torch.zeros(count, len(names) * image_size**2, dtype=torch.int32, device=device)
                tracer(names, image_size, depth=False).rgb_data = warp.from_torch(colours, dtype=warp.uint32)
                frames = colours.view(torch.uint8).view(count, len(names), image_size, image_size, 4)
                self._images = dict(zip(names, frames.unbind(1), strict=True))
            if point_clouds:
                names = _in_model_order(model, point_clouds)
                depths = tracer(names, DEPTH_SIZE, depth=True).depth_data
                for k, name in enumerate(names):
                    depth = depths[:, k * DEPTH_SIZE**2 : (k + 1) * DEPTH_SIZE**2]
                    self._clouds[name] = torch.zeros(count, points, 3, device=device)
                    work.append(_selection(task, model.camera(name), depth, data, self._clouds[name]))

        def trace() -> None:
            mujoco_warp.kinematics(on_device, data)
            mujoco_warp.com_pos(on_device, data)  # for cameras that follow a centre of mass
            mujoco_warp.camlight(on_device, data)
            for run in work:
                run()

        self._trace = recorded(trace, device)

    def views(self, qpos: Tensor) -> Observation:
        """Render the states `qpos` `(N, nq)`: images `(N, 3, size, size)` uint8 and clouds `(N, points, 3)`."""
        self._qpos.copy_(qpos)
        self._trace()
        images = {
            IMAGE_PREFIX + camera: frame[..., :3].flip(-1).permute(0, 3, 1, 2).contiguous()
            for camera, frame in self._images.items()
        }
        return images | {CLOUD_PREFIX + camera: cloud.clone() for camera, cloud in self._clouds.items()}


def _drawn_model(model: mujoco.MjModel) -> mujoco.MjModel:
    """Copy of `model` without collisions that the ray tracer draws in the colours of OpenGL.

    In OpenGL, the colour of a geom replaces the colour of its material, a geom without opacity is not drawn, and the
    texture of a plane may be repeated over its size instead of per metre.
    """
    model = copy(model)
    model.geom_contype[:] = model.geom_conaffinity[:] = 0
    for geom in range(model.ngeom):
        rgba, size, material = model.geom_rgba[geom], model.geom_size[geom, :2], int(model.geom_matid[geom])
        if material >= 0:
            if (rgba != _NO_RGBA).any():
                model.mat_rgba[material] = rgba
            rgba = model.mat_rgba[material]
            if (
                model.geom_type[geom] == mujoco.mjtGeom.mjGEOM_PLANE
                and size.all()
                and not model.mat_texuniform[material]
            ):
                model.mat_texuniform[material] = True
                model.mat_texrepeat[material] /= size
        if rgba[3] == 0:
            model.geom_group[geom] = mujoco.mjNGROUP - 1  # a group that is not drawn
    return model


def _in_model_order(model: mujoco.MjModel, names: Sequence[str]) -> list[str]:
    return [name for name in (model.camera(i).name for i in range(model.ncam)) if name in names]


def _selection(task: MujocoTask, camera: Any, depth: Any, data: Any, cloud: Tensor) -> Callable[[], Any]:
    """Launch that selects points of depth images `(N, pixels)` for `cloud` `(N, points, 3)`."""
    import warp

    from robopolicy.sim.backends.warp_points import BLOCK, select_points

    rays = unproject(np.ones((DEPTH_SIZE, DEPTH_SIZE)), float(camera.fovy[0]), np.zeros(3), np.eye(3))
    low, high = task.workspace or (np.full(3, -np.inf), np.full(3, np.inf))
    inputs = [depth, warp.array(rays, dtype=warp.vec3), int(camera.id), data.cam_xpos, data.cam_xmat]
    inputs += [warp.vec3(*low), warp.vec3(*high)]
    inputs += [warp.zeros(depth.shape, dtype=warp.vec3), warp.zeros(depth.shape, dtype=float)]
    inputs.append(warp.from_torch(cloud, dtype=warp.vec3))
    return lambda: warp.launch_tiled(select_points, dim=[len(cloud)], inputs=inputs, block_dim=BLOCK)
