//! The OCI hook's reader and writer of `ld.so.cache`, whose content is the image's: no input ends it, what it writes it
//! reads again, with the driver's libraries found first, and writing them a second time changes nothing.
#![no_main]

use aliquot_fuzz::seeds;
use cache::Library;
use libfuzzer_sys::fuzz_target;

#[path = "../../../hook/oci/src/cache.rs"]
mod cache;

fn library(name: &str, path: &str, compat32: bool) -> Library {
    Library { name: name.to_owned(), path: path.to_owned(), compat32 }
}

fn libraries() -> Vec<Library> {
    vec![
        library("libcuda.so", "/usr/lib64/libcuda.so", false),
        library("libcuda.so.1", "/usr/lib64/libcuda.so.1", false),
        library("libcuda.so.1", "/usr/lib/i386-linux-gnu/libcuda.so.1", true),
        library("libnvidia-ml.so.1", "/usr/lib64/libnvidia-ml.so.1", false),
    ]
}

fn caches() -> Vec<Vec<u8>> {
    let own = [("libc.so.6", "/lib/libc.so.6"), ("libcuda.so.1", "/stubs/libcuda.so.1")];
    let own = own.map(|(name, path)| library(name, path, false));
    let new = cache::with(None, &own).expect("a cache");
    let mut old = b"ld.so-1.7.0\0\0\0\0\0".to_vec();
    old.extend(&new);
    vec![new, old, std::fs::read("/etc/ld.so.cache").unwrap_or_default()]
}

fuzz_target!(init: seeds(caches), |bytes: &[u8]| {
    let libraries = libraries();
    if let Some(written) = cache::with(Some(bytes), &libraries) {
        assert_eq!(cache::with(Some(&written), &libraries).as_ref(), Some(&written));
    }
});
