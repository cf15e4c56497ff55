//! Link arguments of the stub: no start files, so no INIT; lazy binding, so that nothing is resolved in
//! programs that never use CUDA; and exactly libdl and libc as needed libraries, which every glibc has.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=../core/src/table.rs");
    for argument in [
        "-nostartfiles",
        "-nodefaultlibs",
        "-Wl,-z,lazy",
        "-Wl,--hash-style=gnu",
        "-Wl,-soname,libaliquot_preload.so",
        "-Wl,--no-as-needed",
        "-l:libdl.so.2",
        "-l:libc.so.6",
    ] {
        println!("cargo:rustc-cdylib-link-arg={argument}");
    }
    // Pages of up to 64 KiB: with a part that becomes read-only, padding alone would make the file that large.
    if std::env::var("CARGO_CFG_TARGET_ARCH").as_deref() == Ok("aarch64") {
        println!("cargo:rustc-cdylib-link-arg=-Wl,-z,norelro");
    }
}
