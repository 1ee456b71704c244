#!/usr/bin/env bash
# Install a wheel in a bare Debian and start the first program there, with the times of both:
#   packages/bare_root.sh WHEEL [SUITE]
# It needs root, debootstrap and a network. The Python of SUITE (bookworm: 3.11) must be that of
# the wheel. The root is made once, in build/bare, and copied for every run.
set -eu
wheel=$(realpath "$1") suite=${2:-bookworm}
cd "$(dirname "$0")/.."
base=build/bare/$suite
if [ ! -e "$base/made" ]; then
  rm -rf "$base" && mkdir -p "$base"
  debootstrap --variant=minbase --include=python3,python3-pip "$suite" "$base" >"$base.log"
  touch "$base/made"
fi
root=$(mktemp -d build/bare/root.XXXXXX)
trap 'rm -rf --one-file-system "$root"' EXIT
cp -a "$base/." "$root"
cp "$wheel" "$root/root"
cp /etc/resolv.conf "$root/etc"
# Certificates of a proxy between here and PyPI, if there is one.
if [ -n "${PIP_CERT:-}" ]; then cp "$PIP_CERT" "$root/root/certificates.pem"; fi
cat >"$root/root/first.py" <<'END'
import numpy as np

import pycoll

with pycoll.init() as comm:
    print(comm.all_reduce(np.full(4, comm.rank + 1.0)))
END
cat >"$root/root/try.sh" <<'END'
set -eu
cd /root
if [ -e certificates.pem ]; then export PIP_CERT=/root/certificates.pem; fi
seconds() { awk "BEGIN { printf \"%.1f\", ($3 - $2) / 1e9; exit }"; echo " s  $1"; }
start=$(date +%s%N)
pip install -q --no-cache-dir --break-system-packages --root-user-action=ignore ./*.whl
installed=$(date +%s%N)
pycoll run -n 4 first.py >said
done=$(date +%s%N)
seconds "pip install $(ls ./*.whl), with NumPy" "$start" "$installed"
seconds "pycoll run -n 4, with the first all_reduce" "$installed" "$done"
test "$(grep -c '\[10. 10. 10. 10.\]' said)" = 4 || { cat said; exit 1; }
pycoll doctor | grep -E "^ok +(pycoll|NumPy|engine|memfd|futex)"
END
# The mount ends with the name space.
inside='mount -t proc proc "$0/proc"; chroot "$0" env -i PATH="$PATH" sh /root/try.sh'
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
  unshare --mount --pid --fork --propagation private sh -euc "$inside" "$root"
