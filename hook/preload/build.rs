//! Link arguments of the stub. Every program of a container pays for what its loader does with it, so: no start
//! files and no INIT; lazy binding; references to its own symbols are not looked up (`-Bsymbolic`); one writable part,
//! which is not made read-only in part (the cells of the exports have to stay writable, so it would protect little);
//! and libc alone as a needed library: libdl, which old ones have beside it, costs as much as the stub itself.

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
