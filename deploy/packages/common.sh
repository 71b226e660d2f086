# What the builds share; they read it with `source`. Root is necessary: builds run in roots of
# Debian, made by mmdebstrap and entered by chroot.
set -euo pipefail
TOP=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$TOP"
# Root may build in the clone of another user.
git() { command git -c safe.directory="$TOP" "$@"; }
ARCH=$(dpkg --print-architecture)
ROOTS=$TOP/.build/roots
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || date +%s)}

say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }
die() { say "error: $*"; exit 1; }

# need PROGRAM=PACKAGE...: installs what is missing.
need() {
    local each missing=()
    [ "$(id -u)" = 0 ] || die "run this as root; it makes roots of Debian and enters them"
    for each in "$@"; do command -v "${each%=*}" >/dev/null || missing+=("${each#*=}"); done
    [ ${#missing[@]} -gt 0 ] || return 0
    say "installing Debian packages: ${missing[*]}"
    apt-get -qq -o DPkg::Lock::Timeout=300 update
    DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 install -y \
        --no-install-recommends "${missing[@]}" >/dev/null
}

# The version of dist/wheels, which are built from a copy of the sources.
wheels_version() { .build/source/scripts/version; }

# The version as Debian writes it: ~ sorts what comes before a release before it.
debian_version() { sed -E ':more; s/^([^+]*[0-9])\.?(a|b|rc|dev)([0-9])/\1~\2\3/; t more' <<<"$1"; }

# The mirror of Debian: MIRROR, or the one that this machine uses.
mirror() {
    local used
    used=$(apt-get indextargets --format '$(SITE)' 'Origin: Debian' 2>/dev/null | head -n 1 || true)
    echo "${MIRROR:-${used:-http://deb.debian.org/debian}}"
}

# make_root NAME SUITE PACKAGES [OPTIONS OF mmdebstrap...]: makes .build/roots/NAME unless it is
# there with the same packages. PACKAGES are separated by commas.
make_root() {
    local name=$1 suite=$2 packages=$3 stamp=$ROOTS/$1.packages; shift 3
    if [ -e "$stamp" ] && [ "$(cat "$stamp")" = "$suite $packages $*" ]; then return; fi
    say "making the root $name of Debian $suite"
    mkdir -p "$ROOTS"
    rm -rf "$stamp" "${ROOTS:?}/$name"
    mmdebstrap --quiet --mode=root --variant=apt ${packages:+--include="$packages"} "$@" \
        "$suite" "$ROOTS/$name" "$(mirror)"
    echo "$suite $packages $*" >"$stamp"
}

# in_root NAME COMMAND...: runs a command in a root, with this checkout on /src, and with the
# network and pip's settings of this machine. All its mounts end with it.
in_root() {
    local root=$ROOTS/$1 index; shift
    index=${PIP_INDEX_URL:-$(pip config get global.index-url 2>/dev/null || true)}
    mkdir -p "$root/src"
    cp -L /etc/resolv.conf "$root/etc/resolv.conf"
    [ ! -e /etc/ssl/certs/ca-certificates.crt ] ||
        install -D -m 644 /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"
    # shellcheck disable=SC2016
    unshare --mount --propagation private --pid --fork --kill-child sh -c '
        root=$1 top=$2; shift 2
        mount -t proc proc "$root/proc" && mount --bind "$top" "$root/src" && exec chroot "$root" "$@"
    ' sh "$root" "$TOP" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 \
        SOURCE_DATE_EPOCH="$SOURCE_DATE_EPOCH" PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore \
        PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CERT=/etc/ssl/certs/ca-certificates.crt \
        ${index:+PIP_INDEX_URL="$index"} \
        ${HTTPS_PROXY:+HTTPS_PROXY="$HTTPS_PROXY"} "$@"
}
