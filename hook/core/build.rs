//! Link arguments of the core: no start files, so that nothing runs when it is loaded, and libc as the only
//! needed library.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    for argument in [
        "-nostartfiles",
        "-nodefaultlibs",
        "-Wl,-z,now",
        "-Wl,--hash-style=gnu",
        "-Wl,-soname,libaliquot_core.so",
        "-Wl,--no-as-needed",
        "-l:libc.so.6",
    ] {
        println!("cargo:rustc-cdylib-link-arg={argument}");
    }
}
