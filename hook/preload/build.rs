//! Link arguments of the stub.
//!
//! Every program of a container pays for what its loader does with the stub. So there are no start files and
//! no INIT, binding is lazy, and references to its own symbols are not looked up (`-Bsymbolic`). There is one
//! writable part, which is not made read-only in part: the cells of the exports have to stay writable, so it
//! would protect little. And libc is the only needed library: libdl, which old C libraries have beside it,
//! costs as much as the stub itself.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=../core/src/table.rs");
    for argument in [
        "-nostartfiles",
        "-nodefaultlibs",
        "-Wl,-z,lazy",
        "-Wl,--hash-style=gnu",
        "-Wl,-soname,libaliquot_preload.so",
        "-Wl,-Bsymbolic",
        "-Wl,-z,norelro",
        "-Wl,--no-as-needed",
        "-l:libc.so.6",
    ] {
        println!("cargo:rustc-cdylib-link-arg={argument}");
    }
}
