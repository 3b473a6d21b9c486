#!/bin/sh
# Builds Mesa's offline compiler for Apple GPUs (AGX, the M1's instruction set) in a Debian folder: build.sh FOLDER
# Needs Linux, root and Debian's apt; about 6 minutes on 2 cores and 3 GB. Installs mmdebstrap and xz-utils on this
# machine; everything else stays in FOLDER.
set -eu

[ $# = 1 ] || { echo "usage: build.sh FOLDER" >&2; exit 2; }
[ "$(uname -s)" = Linux ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null ||
  { echo "error: building the AGX compiler needs Linux, root and apt" >&2; exit 1; }
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
cd "$1"
folder=$PWD root=$PWD/root
site=$(apt-get indextargets --format '$(SITE)' | grep '/debian$' | head -1)
[ -n "$site" ] || { echo "error: apt has no Debian archive among its sources" >&2; exit 1; }

echo "Getting Mesa's source and a Debian folder to build it in"
apt-get update -qq
apt-get install -y -qq --no-install-recommends mmdebstrap xz-utils >/dev/null
mkdir -p apt/lists/partial apt/cache/archives/partial
keys=/usr/share/keyrings/debian-archive-keyring.gpg
for kind in deb deb-src; do echo "$kind [signed-by=$keys] $site trixie main"; done > apt/sources.list
cat > apt/apt.conf <<END
Dir::Etc::sourcelist "$folder/apt/sources.list";
Dir::Etc::sourceparts "-";
Dir::State::lists "$folder/apt/lists";
Dir::Cache "$folder/apt/cache";
APT::Sandbox::User "root";
END
export APT_CONFIG="$folder/apt/apt.conf"
apt-get update -qq
apt-get source --download-only -qq mesa
unset APT_CONFIG
packages="build-essential ca-certificates meson ninja-build pkg-config xz-utils flex bison glslang-tools glslc
  python3 python3-mako python3-packaging python3-yaml libdrm-dev libelf-dev libexpat1-dev libudev-dev libvulkan-dev
  libzstd-dev zlib1g-dev clang-19 libclang-19-dev libclang-cpp19-dev libclc-19 libclc-19-dev libllvmspirvlib-19-dev
  llvm-19-dev llvm-spirv-19 spirv-tools"
[ -d root/usr ] ||
  mmdebstrap --quiet --variant=essential --include="$(echo $packages | tr ' ' ,)" trixie "$root" "$site"

rm -rf root/src/mesa
mkdir -p root/src/mesa
tar xf mesa_*.orig.tar.xz -C root/src/mesa --strip-components=1
python3 "$here/patch_mesa.py" root/src/mesa

echo "Building"
trap 'umount "$root/dev" "$root/proc" 2>/dev/null || true' EXIT
mount --bind /dev root/dev
mount -t proc proc root/proc || true
chroot "$root" /usr/bin/env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 sh -ec '
  cd /src/mesa
  meson setup build --buildtype=release -Dvulkan-drivers=asahi -Dgallium-drivers= -Dplatforms= -Dvideo-codecs= \
    -Dtools=drm-shim,asahi -Dopengl=false -Dglx=disabled -Degl=disabled -Dgbm=disabled -Dgles1=disabled \
    -Dgles2=disabled -Dllvm=enabled -Dshared-llvm=enabled -Dvalgrind=disabled -Dlibunwind=disabled \
    -Dlmsensors=disabled -Dbuild-tests=false -Dinstall-mesa-clc=true -Dinstall-precomp-compiler=true >/dev/null
  ninja -C build src/asahi/clc/asahi_clc | tail -1'
