"""robopolicy: from demonstrations to hardware, one policy object all the way."""

__version__ = "0.1.0"
