#!/bin/sh
# Off-screen rendering needs EGL or OSMesa. Install Mesa's where we may, otherwise say so in one line and go on.
libraries() { ldconfig -p 2>/dev/null || /sbin/ldconfig -p 2>/dev/null; }
if libraries | grep -qE 'libEGL\.so\.1|libOSMesa\.so'; then exit 0; fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  export DEBIAN_FRONTEND=noninteractive
  { apt-get update -qq && apt-get install -y -qq --no-install-recommends libegl1 libegl-mesa0 libgl1-mesa-dri libgles2 libosmesa6; } >/dev/null 2>&1
fi
if ! libraries | grep -qE 'libEGL\.so\.1|libOSMesa\.so'; then
  echo "No OpenGL library for off-screen rendering: videos are skipped. To get them: sudo apt-get install libegl1 libgl1-mesa-dri libosmesa6"
fi
exit 0
