//! Compiles the kubelet's APIs with protox, so that no protoc is needed on the build machine.

use std::env;
use std::error::Error;
use std::fs;
use std::path::PathBuf;

/// Rust module (also the output folder) and the file that it is made from. Each is compiled on its
/// own: two of them have the same package name, `v1`, and would end up in one file.
const APIS: &[(&str, &str)] = &[
    ("pluginregistration_v1", "kubelet/pluginregistration/v1/api.proto"),
    ("dra_v1", "kubelet/dra/v1/api.proto"),
    ("dra_v1beta1", "kubelet/dra/v1beta1/api.proto"),
    ("dra_health_v1", "kubelet/dra-health/v1/api.proto"),
    ("dra_health_v1alpha1", "kubelet/dra-health/v1alpha1/api.proto"),
    ("deviceplugin_v1beta1", "kubelet/deviceplugin/v1beta1/api.proto"),
    ("podresources_v1", "kubelet/podresources/v1/api.proto"),
];

fn main() -> Result<(), Box<dyn Error>> {
    let out = PathBuf::from(env::var("OUT_DIR")?);
    for (module, file) in APIS {
        println!("cargo::rerun-if-changed={file}");
        let descriptors = protox::compile([file], ["."])?;
        let folder = out.join(module);
        fs::create_dir_all(&folder)?;
        tonic_prost_build::configure()
            .build_client(true)
            .build_server(true)
            .out_dir(&folder)
            .compile_fds(descriptors)?;
    }
    Ok(())
}
