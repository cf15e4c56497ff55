//! Where each distribution has a driver, and that another version in its place is found.

use super::*;
use rstest::rstest;

/// How a driver lies in its root.
struct Laid {
    /// Directory of libraries.
    libraries: &'static str,
    /// Directory of programs.
    programs: &'static str,
    /// Whether links through `/etc/alternatives` lead there, by sonames alone.
    alternatives: bool,
}

const UBUNTU: Laid = Laid { libraries: "usr/lib/TRIPLE", programs: "usr/bin", alternatives: false };

impl Laid {
    fn files(&self, version: &str) -> Vec<String> {
        let libraries = ["libcuda", "libnvidia-ml", "libnvidia-eglcore"];
        let mut files: Vec<String> =
            libraries.iter().map(|name| format!("{}/{name}.so.{version}", self.libraries)).collect();
        files.push(format!("lib/firmware/nvidia/{version}/gsp_ga10x.bin"));
        files
    }

    /// Puts a version there.
    fn install(&self, made: Made, version: &str) -> Made {
        let program = format!("{}/nvidia-smi", self.programs);
        let files = self.files(version);
        let all: Vec<&str> = files.iter().map(String::as_str).chain([program.as_str()]).collect();
        let mut made = made.files(&all);
        for soname in ["libcuda.so", "libnvidia-ml.so"] {
            made = made.link(&format!("{}/{soname}.1", self.libraries), &format!("{soname}.{version}"));
        }
        made
    }

    /// What update-alternatives has made once and for all.
    fn alternatives(&self, mut made: Made) -> Made {
        for (name, dir, own) in [
            ("libcuda.so.1", "usr/lib/TRIPLE", self.libraries),
            ("libnvidia-ml.so.1", "usr/lib/TRIPLE", self.libraries),
            ("nvidia-smi", "usr/bin", self.programs),
        ] {
            made = made
                .link(&format!("etc/alternatives/{name}"), &format!("/{own}/{name}"))
                .link(&format!("{dir}/{name}"), &format!("/etc/alternatives/{name}"));
        }
        made
    }

    fn remove(&self, made: &Made, version: &str) {
        let sonames = ["libcuda.so.1", "libnvidia-ml.so.1"].map(|name| format!("{}/{name}", self.libraries));
        for file in self.files(version).iter().chain(&sonames) {
            fs::remove_file(made.0.path().join(file.replace("TRIPLE", &multiarch()))).unwrap();
        }
    }

    fn assert_found(&self, files: &DriverFiles, version: &str) {
        assert_eq!(files.version.as_deref(), Some(version));
        let (libraries, programs) = (self.libraries, self.programs);
        let inside = |name: &str| ["/usr/lib64", "/usr/lib/TRIPLE"].map(|dir| format!("{dir}/{name}"));
        for (name, file) in [
            ("libcuda.so.1".to_owned(), "libcuda"),
            (format!("libcuda.so.{version}"), "libcuda"),
            ("libnvidia-ml.so.1".to_owned(), "libnvidia-ml"),
            // Nothing links to it.
            (format!("libnvidia-eglcore.so.{version}"), "libnvidia-eglcore"),
        ] {
            for path in inside(&name) {
                let found = files.at(&path).map(|(host, _)| host);
                assert_eq!(found, Some(format!("{libraries}/{file}.so.{version}")), "{path}");
            }
        }
        let at = |path: &str| files.at(path).map(|(host, _)| host);
        assert_eq!(at("/usr/bin/nvidia-smi"), Some(format!("{programs}/nvidia-smi")));
        let firmware = format!("lib/firmware/nvidia/{version}/gsp_ga10x.bin");
        assert_eq!(at(&format!("/{firmware}")), Some(firmware));
    }
}

#[rstest]
#[case::ubuntu_and_a_driver_container_of_it(UBUNTU)]
#[case::red_hat_and_a_driver_container_of_it(Laid { libraries: "usr/lib64", ..UBUNTU })]
#[case::debian(Laid {
    libraries: "usr/lib/TRIPLE/nvidia/current",
    programs: "usr/lib/nvidia/current",
    alternatives: true,
})]
#[case::a_branch_of_debians_for_servers(Laid {
    libraries: "usr/lib/TRIPLE/nvidia/tesla-535",
    programs: "usr/lib/nvidia/tesla-535",
    alternatives: true,
})]
#[case::gke_under_home_kubernetes_bin_nvidia(Laid { libraries: "lib64", programs: "bin", ..UBUNTU })]
#[case::under_opt(Laid { libraries: "lib", programs: "bin", ..UBUNTU })]
#[case::an_installer_for_containers(Laid {
    libraries: "usr/local/nvidia/lib64",
    programs: "usr/local/nvidia/bin",
    ..UBUNTU
})]
fn a_driver_is_found_wherever_it_lies_and_so_is_the_next_version(#[case] laid: Laid) {
    let mut made = laid.install(Made::new(), VERSION);
    if laid.alternatives {
        made = laid.alternatives(made);
    }
    let driver = Driver::new(made.roots());
    laid.assert_found(&driver.files(), VERSION);
    assert!(find_library(made.0.path(), "libnvidia-ml.so.1").is_some());
    assert!(find_program(made.0.path(), "nvidia-smi").is_some());
    // The packages first, and the module with the next boot.
    laid.remove(&made, VERSION);
    let made = laid.install(made, "580.95.05");
    laid.assert_found(&driver.files(), "580.95.05");
    made.module("580.95.05");
    laid.assert_found(&driver.files(), "580.95.05");
}
