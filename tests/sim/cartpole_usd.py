"""Assets for Isaac Lab's cart-pole tasks, generated here because the package loads its own from an asset server."""

from pathlib import Path
from typing import Any

PLANE = "Isaac/IsaacLab/Environments/Grid/default_ground_plane_checker_v1/default_ground_plane.usda"
CARTPOLE = "Isaac/IsaacLab/Robots/Classic/Cartpole/cartpole.usd"


def write_assets(root: Path) -> None:
    """Write a ground plane and a cart-pole under `root`, for use as `ISAACSIM_ASSET_ROOT`."""
    from pxr import UsdGeom, UsdPhysics

    stage = _stage(root / PLANE)
    stage.SetDefaultPrim(UsdGeom.Xform.Define(stage, "/World").GetPrim())
    plane = UsdGeom.Plane.Define(stage, "/World/plane")
    plane.CreateAxisAttr("Z")
    UsdPhysics.CollisionAPI.Apply(plane.GetPrim())
    stage.Save()
    _write_cartpole(_stage(root / CARTPOLE))


def _write_cartpole(stage: Any) -> None:
    """Write a rail fixed to the world, a 1 kg cart sliding along x, and a 0.5 kg, 1 m pole rotating about y."""
    from pxr import Gf, UsdGeom, UsdPhysics

    root = UsdGeom.Xform.Define(stage, "/cartpole").GetPrim()
    stage.SetDefaultPrim(root)
    UsdPhysics.ArticulationRootAPI.Apply(root)
    rail = _box(stage, "rail", (8.0, 0.05, 0.05), 0.0, 1.0)
    cart = _box(stage, "cart", (0.4, 0.2, 0.2), 0.0, 1.0)
    pole = _box(stage, "pole", (0.06, 0.06, 1.0), 0.5, 0.5)
    UsdPhysics.FixedJoint.Define(stage, "/cartpole/root_joint").CreateBody1Rel().SetTargets([rail])
    slider = UsdPhysics.PrismaticJoint.Define(stage, "/cartpole/slider_to_cart")
    hinge = UsdPhysics.RevoluteJoint.Define(stage, "/cartpole/cart_to_pole")
    for joint, axis, below, above in ((slider, "X", rail, cart), (hinge, "Y", cart, pole)):
        joint.CreateAxisAttr(axis)
        joint.CreateBody0Rel().SetTargets([below])
        joint.CreateBody1Rel().SetTargets([above])
    slider.CreateLowerLimitAttr(-4.0)
    slider.CreateUpperLimitAttr(4.0)
    UsdPhysics.DriveAPI.Apply(slider.GetPrim(), "linear")
    hinge.CreateLocalPos0Attr(Gf.Vec3f(0, 0, 0))
    hinge.CreateLocalPos1Attr(Gf.Vec3f(0, 0, -0.5))
    UsdPhysics.DriveAPI.Apply(hinge.GetPrim(), "angular")
    stage.Save()


def _box(stage: Any, name: str, size: tuple[float, float, float], height: float, mass: float) -> Any:
    """Add a box of `size` [m] and `mass` [kg] whose centre is `height` [m] above the rail; return its path."""
    from pxr import Gf, UsdGeom, UsdPhysics

    body = UsdGeom.Xform.Define(stage, f"/cartpole/{name}")
    body.AddTranslateOp().Set(Gf.Vec3d(0, 0, height))
    UsdPhysics.RigidBodyAPI.Apply(body.GetPrim())
    inertia = UsdPhysics.MassAPI.Apply(body.GetPrim())
    inertia.CreateMassAttr(mass)
    squares = [length**2 for length in size]
    inertia.CreateDiagonalInertiaAttr(Gf.Vec3f(*(mass * (sum(squares) - square) / 12 for square in squares)))
    inertia.CreateCenterOfMassAttr(Gf.Vec3f(0, 0, 0))
    cube = UsdGeom.Cube.Define(stage, f"/cartpole/{name}/geom")
    cube.CreateSizeAttr(1.0)
    cube.AddScaleOp().Set(Gf.Vec3f(*size))
    return body.GetPath()


def _stage(path: Path) -> Any:
    from pxr import Usd, UsdGeom

    path.parent.mkdir(parents=True, exist_ok=True)
    stage = Usd.Stage.CreateNew(str(path))
    UsdGeom.SetStageUpAxis(stage, UsdGeom.Tokens.z)
    UsdGeom.SetStageMetersPerUnit(stage, 1.0)
    return stage
