#!/usr/bin/env bash
# Runs a command in this folder as on a newcomer's machine: in a bare Debian that has the packages that
# README.md names, and nothing else.
#
#   tools/testing/bare_root.sh make test
#
# The folder has the same path there, so what the command builds can be used here afterwards. The
# machine's Debian mirror, pip index, proxies and certificates serve there too, and the variables that
# steer a build. Needs root on Debian, and takes a minute. Nothing of it stays: its mounts and processes
# are in namespaces of their own and end with it. Where that is impossible it says why, runs nothing and
# ends with status 69.
set -euo pipefail
cd "$(dirname "$0")/../.."
certificates=/etc/ssl/certs/ca-certificates.crt
impossible() { echo "bare_root.sh: no bare Debian can be made here: $1" >&2; exit 69; }

if [ "${1:-}" = --inside ]; then # in the namespaces, as their first process
  root=$2 here=$PWD
  shift 2
  bind() { mkdir -p "$root$1" && mount --bind "$1" "$root$1"; }
  mount -t proc proc "$root/proc"
  mount -t tmpfs -o mode=755 tmpfs "$root/dev"
  for device in null zero full random urandom; do
    touch "$root/dev/$device" && mount --bind "/dev/$device" "$root/dev/$device"
  done
  mkdir -m 1777 "$root/dev/shm"
  ln -s /proc/self/fd "$root/dev/fd"
  for name in stdin:0 stdout:1 stderr:2; do ln -s "fd/${name#*:}" "$root/dev/${name%:*}"; done
  bind "$here"
  history=$(git rev-parse --path-format=absolute --git-common-dir 2>/dev/null || true)
  if [ -n "$history" ] && [ "$history" != "$here/.git" ]; then bind "$history"; fi # of a worktree
  carried=()
  names='(MY_OPS|TORCH)\w*|MAX_JOBS|(https?|ftp|no|all)_proxy'
  while IFS= read -r -d '' variable; do carried+=("$variable"); done \
    < <(env -0 | grep -zixE "($names)=.*")
  in_root() {
    chroot "$root" /usr/bin/env -i HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
      TERM="${TERM:-dumb}" LANG=C.UTF-8 SSL_CERT_FILE=$certificates "${carried[@]}" "$@"
  }
  packages=$(sed -n 's/.*`apt install \(.*\)`.*/\1/p' README.md | head -1)
  in_root sh -c "apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -qq --no-install-recommends $packages" >"$root/var/log/packages" 2>&1 ||
    { tail -5 "$root/var/log/packages" >&2; impossible "apt cannot install $packages"; }
  cp -L $certificates "$root$certificates" # a package wrote its own
  echo "In a bare Debian with $packages: $*"
  in_root sh -c 'cd "$1" && shift && exec "$@"' sh "$here" "$@"
  exit
fi

(($# > 0)) || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit 2; }
[ "$(id -u)" = 0 ] || impossible 'it needs root'
unshare --mount --pid --fork mount --make-rprivate / 2>/dev/null || impossible 'it may not mount'
[ -e $certificates ] || impossible "there is no $certificates (Debian: apt install ca-certificates)"
command -v debootstrap >/dev/null ||
  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq debootstrap; } >/dev/null 2>&1 ||
  impossible 'there is no debootstrap (Debian: apt install debootstrap)'
suite=$(. /etc/os-release && [ "$ID" = debian ] && echo "$VERSION_CODENAME") || impossible 'this is not Debian'
mirror=$(apt-get indextargets --format '$(CODENAME) $(REPO_URI)' 2>/dev/null |
  sed -n "s/^$suite //p" | grep -m1 .) || impossible "apt knows no mirror of $suite"

root=$(mktemp -d -p /var/tmp my_ops-bare-root.XXXXXX)
trap 'rm -rf --one-file-system "$root" "$root.log"' EXIT
debootstrap --force-check-gpg --variant=minbase "$suite" "$root" "$mirror" >"$root.log" 2>&1 ||
  { tail -5 "$root.log" >&2; impossible 'debootstrap failed'; }
chmod 755 "$root"
apt-config dump | grep '^Acquire::' >"$root/etc/apt/apt.conf.d/machine" || true
mkdir -p "$root/etc/ssl/certs"
for file in /etc/resolv.conf /etc/hosts $certificates; do cp -L $file "$root$file"; done
{
  printf '[global]\ncert = %s\n' $certificates
  python3 -m pip config list 2>/dev/null | # the settings of highest priority first; not folders of this machine
    sed -nE "s/^[^=]*\.(index-url|extra-index-url|trusted-host|proxy|timeout)='(.*)'$/\1 = \2/p" |
    sed -E 's/ ?file:[^ ]*//g; / =$/d' | sort -s -u -k1,1
} >"$root/etc/pip.conf"
unshare --mount --pid --fork --kill-child --propagation private "$0" --inside "$root" "$@"
