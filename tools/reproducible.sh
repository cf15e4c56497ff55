# For scripts that build what is shipped, from the root of the source: sets `time` of the source, `remap` flags, and the
# linker, so that the same source gives the same bytes on any machine.
time=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null)} ||
  { echo "no git checkout: set SOURCE_DATE_EPOCH to the time of this source" >&2; exit 1; }

# Where the source, crates and the compiler lie is in no program; the standard library is named as where it was built.
cargo_home=${CARGO_HOME:-$HOME/.cargo}
std=/rustc/$(rustc -vV | sed -n 's/^commit-hash: //p')
# shellcheck disable=SC2034 # for who sources this
remap="--remap-path-prefix=$PWD=/aliquot --remap-path-prefix=$cargo_home=/cargo"
remap+=" --remap-path-prefix=$(rustc --print sysroot)/lib/rustlib/src/rust=$std"
zig=$(tools/zig)
export PATH=$zig/bin:$PATH PYTHONPATH=$zig SOURCE_DATE_EPOCH=$time
unset RUSTFLAGS CARGO_ENCODED_RUSTFLAGS

# standard_library TARGET...: sees that Rust has it.
standard_library() {
  local one
  for one in "$@"; do
    [[ -d $(rustc --print target-libdir --target "$one") ]] || rustup target add "$one" >&2
  done
}
