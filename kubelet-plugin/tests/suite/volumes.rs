//! A pod's own volumes over, above and beside what a share mounts, under real container runtimes.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "helpers of tests fail the test"
)]

use crate::common;

use aliquot_nvml::fake::{FakeGpus, h100_80};
use common::container::{Bundle, Runc, edits, runcs, with_limiter};
use common::{World, now, request};
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::atomic::{AtomicU32, Ordering};

/// A container with shares, and what the tenant has to put over their files.
struct Pod {
    bundle: Bundle,
    world: World,
}

impl Pod {
    fn new(shares: &[(&str, &str)]) -> Self {
        let world = World::new(FakeGpus::new([h100_80(0), h100_80(1)]));
        let mut bundle = Bundle::new(&["cat"]);
        let node = with_limiter(world.node(), bundle.folder.path());
        let prepared = node.prepare(&request("c", shares), false, now()).unwrap();
        bundle.edits = edits(&node, "c", &prepared);
        assert_eq!(bundle.edits.hooks.len(), shares.len());
        Self { bundle, world }
    }

    fn with_a_share() -> Self {
        Self::new(&[("s", "gpu-0-share")])
    }

    /// What is mounted at the path of ours that ends so: on the host, and in the container.
    fn ours(&self, end: &str) -> (PathBuf, String) {
        let mut found = self.bundle.edits.mounts.iter().filter(|mount| mount.container_path.contains(end));
        let mount = found.next().unwrap_or_else(|| panic!("{end} is not mounted"));
        (PathBuf::from(&mount.host_path), mount.container_path.clone())
    }

    /// A file of the tenant's that says the same as one of ours.
    fn copy(&self, of: &Path) -> PathBuf {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("tenants-{}", NEXT.fetch_add(1, Ordering::Relaxed));
        let to = self.bundle.folder.path().join(name);
        fs::copy(of, &to).unwrap();
        to
    }

    /// A directory of the tenant's.
    fn volume(&self, mode: u32) -> PathBuf {
        let path = self.bundle.folder.path().join(format!("volume-{mode:o}"));
        fs::create_dir_all(&path).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        path
    }

    /// Has the image say that a directory is elsewhere, deeper than anything of ours.
    fn link(&self, directory: &str) -> String {
        let target = "/a/b/c/d/e/f/g/h".to_owned();
        let link = self.bundle.at(directory);
        fs::create_dir_all(self.bundle.at(&target)).unwrap();
        fs::create_dir_all(link.parent().unwrap()).unwrap();
        symlink(&target, link).unwrap();
        target
    }

    fn mount(&mut self, source: PathBuf, at: &str) {
        self.bundle.volumes.push((source, at.to_owned()));
    }

    fn run(&self, runc: &Runc) -> Output {
        self.bundle.run(runc, &["/bin/cat", "/etc/ld.so.preload"], "/")
    }

    fn starts(&self, runc: &Runc) {
        let output = self.run(runc);
        assert!(output.status.success(), "{runc:?}: {output:?}");
    }

    fn is_refused(&self, runc: &Runc, reason: &str) {
        let output = self.run(runc);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(reason), "{reason}: {runc:?}: {output:?}");
    }
}

#[test]
fn a_container_of_shares_starts_and_so_does_one_with_volumes_elsewhere() {
    for runc in &runcs("containers of shares") {
        Pod::with_a_share().starts(runc);
        Pod::new(&[("a", "gpu-0-share"), ("b", "gpu-1-share")]).starts(runc);
        // Each of several hooks finds the node's list below the one that the former has merged.
        let pod = Pod::new(&[("a", "gpu-0-share"), ("b", "gpu-1-share")]);
        pod.bundle.write("/etc/ld.so.preload", "/lib/mine.so\n");
        let said = pod.run(runc).stdout;
        let stub = pod.ours("libaliquot_preload.so").1;
        assert_eq!(String::from_utf8_lossy(&said), format!("/lib/mine.so\n{stub}\n"));
        let mut pod = Pod::with_a_share();
        pod.mount(pod.volume(0o777), "/tmp");
        pod.mount(pod.volume(0o777), "/run/other/of/the/pods");
        pod.mount(pod.volume(0o777), "/usr/local/lib/python3/site-packages");
        pod.link("/etc");
        // As CRI-O makes it for a root that is read-only.
        pod.mount(pod.volume(0o755), "/run");
        pod.starts(runc);
    }
}

#[test]
fn a_volume_over_a_file_of_a_share_keeps_the_container_from_starting() {
    for runc in &runcs("volumes over our files") {
        for file in ["quota", "grant"] {
            let mut pod = Pod::with_a_share();
            let (host, inside) = pod.ours("/quota/");
            pod.mount(pod.copy(&host.join(file)), &format!("{inside}/{file}"));
            pod.is_refused(runc, &format!("something else is mounted in {inside} in the container"));
        }
    }
}

#[test]
fn a_volume_that_a_link_of_the_image_leads_over_ours_keeps_the_container_from_starting() {
    for runc in &runcs("volumes over our files by links") {
        for (end, directory) in [
            ("libaliquot_preload.so", "/usr/local/lib/aliquot"),
            ("libaliquot_core.so", "/usr/local/lib"),
            ("ld.so.preload", "/etc"),
            ("/quota/", "/run/aliquot/quota"),
            ("/region/", "/run"),
        ] {
            let mut pod = Pod::with_a_share();
            let (host, inside) = pod.ours(end);
            let over = inside.replacen(directory, &pod.link(directory), 1);
            let mine = if host.is_dir() {
                let volume = pod.volume(0o755);
                fs::copy(host.join("quota"), volume.join("quota")).unwrap();
                volume
            } else {
                pod.copy(&host)
            };
            pod.mount(mine, &over);
            pod.is_refused(
                runc,
                &format!("{inside} in the container is not what the node has mounted there"),
            );
        }
    }
}

#[test]
fn the_region_that_is_mounted_as_a_directory_is_looked_at_as_well() {
    for runc in &runcs("volumes over the region of an earlier release") {
        let mut pod = Pod::with_a_share();
        let (host, inside) = pod.ours("/region/");
        // As an earlier release had made it.
        let share = host.parent().unwrap().parent().unwrap();
        fs::remove_file(share.join("layout")).unwrap();
        let node = with_limiter(pod.world.node(), pod.bundle.folder.path());
        let again = node.prepare(&request("c", &[("s", "gpu-0-share")]), false, now()).unwrap();
        pod.bundle.edits = edits(&node, "c", &again);
        assert_eq!(pod.ours("/region/").0, share.join("region"));
        pod.starts(runc);
        pod.mount(pod.copy(&host), &inside);
        let directory = inside.strip_suffix("/region").unwrap();
        pod.is_refused(runc, &format!("something else is mounted in {directory} in the container"));
    }
}

#[test]
fn a_quota_of_the_pods_own_beside_the_nodes_keeps_the_container_from_starting() {
    for runc in &runcs("further quotas") {
        let mut pod = Pod::with_a_share();
        let (host, inside) = pod.ours("/quota/");
        let volume = pod.volume(0o755);
        fs::copy(host.join("quota"), volume.join("quota")).unwrap();
        let further = Path::new(&inside).with_file_name("further").display().to_string();
        pod.mount(volume, &further);
        pod.is_refused(runc, &format!("{further} in the container is no quota of the node's"));
        // One that the image has.
        let pod = Pod::with_a_share();
        pod.bundle.copy(&host.join("quota"), &format!("{further}/quota"));
        pod.is_refused(runc, &format!("{further} in the container is no quota of the node's"));
    }
}

#[test]
fn a_volume_above_ours_in_which_others_than_root_write_keeps_the_container_from_starting() {
    for runc in &runcs("volumes above our files") {
        for at in ["/run", "/run/aliquot", "/usr/local/lib"] {
            let mut pod = Pod::with_a_share();
            pod.mount(pod.volume(0o777), at);
            pod.is_refused(runc, &format!("is found through {at}, "));
        }
        // What leads there can be changed as well, if it is in a volume.
        let mut pod = Pod::with_a_share();
        let volume = pod.volume(0o777);
        symlink("/elsewhere", volume.join("aliquot")).unwrap();
        fs::create_dir(pod.bundle.at("/elsewhere")).unwrap();
        pod.mount(volume, "/run");
        pod.is_refused(runc, "is found through /run/aliquot");
    }
}

#[test]
fn a_spec_of_an_earlier_release_still_starts_its_containers() {
    for runc in &runcs("specs of earlier releases") {
        let mut pod = Pod::with_a_share();
        pod.bundle.edits.hooks[0].args.truncate(4);
        pod.starts(runc);
    }
}
