//! Builds a claim's CDI spec. The spec has one device for each allocation result, because the kubelet gives a
//! container only the ids of the requests that it names, and one more device with the edits that are common
//! to all. Pure: it does no I/O.
//!
//! A container whose device goes to a virtual machine gets that device's edits and not the common ones: it
//! has no use for the driver's files.
//!
//! Nothing here may collide when one container gets several devices. Variables, paths and directories carry
//! the result id, and the common edits are the same for every claim.

mod extra_mount;

pub use extra_mount::{ExtraMount, ExtraMountError};

use crate::claim::ClaimRef;
use crate::devices::CharDevice;
use crate::devices::drm::DrmNode;
use crate::driver::{CONTAINER_LIBRARY_DIR_32, DriverFiles, container_library_dirs};
use crate::ledger::{Device, Share};
use crate::share::RegionMount;
use aliquot_cdi::{ContainerEdits, Device as CdiDevice, DeviceNode, Hook, HookName, Mount, NameError, Spec};
use aliquot_model::DriverCapabilities;
use aliquot_mps::contract::{ClaimDir, PIPE_DIR};
use std::path::{Path, PathBuf};

/// The class part of this driver's CDI kind; the vendor is the driver's name.
pub const CLASS: &str = "claim";
/// The prefix of the variables that name a device of this driver; the value is `<device>=<UUID>`.
pub const DEVICE_ENV: &str = "ALIQUOT_DEVICE_";
/// The prefix of the variables that mark a partition as adopted: the partition existed before the claim.
const ADOPTED_ENV: &str = "ALIQUOT_ADOPTED_";
/// The prefix of the variables that give the PCI address of a GPU of a virtual machine.
const PASSED_ENV: &str = "ALIQUOT_VFIO_";
/// The variable with the boot in which a spec was written; the devices that the spec gives ended with that
/// boot.
pub const BOOT_ENV: &str = "ALIQUOT_BOOT_ID";
/// The variable with the namespace and name of the claim.
pub const CLAIM_ENV: &str = "ALIQUOT_CLAIM";
/// The prefix of HAMi's variables for a memory limit.
const INDEXED_MEMORY_ENV: &str = "CUDA_DEVICE_MEMORY_LIMIT_";
/// The variable that keeps a legacy NVIDIA runtime hook in the path from adding devices of its own.
const NO_DEVICES: (&str, &str) = ("NVIDIA_VISIBLE_DEVICES", "void");
/// The directory in the container with the quota files.
pub const QUOTA_DIR: &str = "/run/aliquot/quota";
/// The directory in the container with the regions.
pub const REGION_DIR: &str = "/run/aliquot/region";
/// The directory in the container with the limiter.
pub const LIMITER_DIR: &str = "/usr/local/lib/aliquot";
/// The file name of the limiter's stub library.
pub const PRELOAD: &str = "libaliquot_preload.so";
/// The file name of the list that names the stub; [`Limiter::preload_file`] is its path.
pub const PRELOAD_LIST: &str = "ld.so.preload";
/// The file name of the limiter's core library.
pub const CORE: &str = "libaliquot_core.so";

/// The name of this driver's hooks: the first of their arguments.
const HOOK: &str = "aliquot-hook";
/// The name of this driver's hooks before they were told of mounts and of the driver. An agent of that time
/// runs all hooks of this name with its own program, which does not know these arguments. Hooks of any other
/// name it leaves alone, with the program of the release that wrote them.
const FORMER_HOOK: &str = "aliquot-oci-hook";
/// The name of hooks with arguments that came later still (links, libraries for 32-bit programs, GPUs without
/// forward compatibility). The name differs for the same reason.
const LATER_HOOK: &str = "aliquot-hook-2";
/// The hook's task for the container of a share; its second argument.
const SHARE_TASK: &str = "create-container";
/// The hook's task for a container with the driver's files.
const DRIVER_TASK: &str = "driver";
/// The hook's task for a container with DRM nodes.
const LINK_TASK: &str = "link";
/// The hook's option that describes a mount of a share. It comes after all other arguments.
const MOUNTED: &str = "--mounted";

/// The whole environment of this driver's hooks. Without one, runc up to 1.2 runs hooks with the container's
/// environment.
pub const HOOK_ENV: [&str; 1] = ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"];

/// Seconds that a runtime waits for a hook of this driver. The hook ends by itself before that: its trials
/// have 10 s.
pub const HOOK_TIMEOUT: u32 = 30;

/// The limiter's files on the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limiter {
    /// The release; part of the path in the container.
    pub version: String,
    /// The host directory with both libraries.
    pub host_dir: PathBuf,
    /// The host file with the one line that names the stub, for `/etc/ld.so.preload`.
    pub preload_file: PathBuf,
}

/// The parts of this driver that containers of a claim get.
#[derive(Debug, Clone, Copy, Default)]
pub struct Ours<'a> {
    /// The limiter, for shares.
    pub limiter: Option<&'a Limiter>,
    /// The directory that a claim shares with its MPS daemon.
    pub daemon: Option<&'a ClaimDir>,
}

/// The facts of the node that all specs share.
#[derive(Debug, Clone)]
pub struct Site {
    /// The name of the driver.
    pub driver: String,
    /// The capabilities that select the driver's files that every container gets.
    pub capabilities: DriverCapabilities,
    /// The mounts that the administrator asked for.
    pub mounts: Vec<ExtraMount>,
    /// The host directory of shares.
    pub shares_dir: PathBuf,
    /// The host path of the OCI hook.
    pub oci_hook: Option<PathBuf>,
}

/// The parts of a device's edits that are known only once the device exists.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Nodes {
    /// The device node of the GPU, and the capability nodes that open a partition.
    pub devices: Vec<CharDevice>,
    /// The GPU's DRM nodes, which graphics programs open.
    pub drm: Vec<DrmNode>,
    /// True if CUDA starts on the GPU only with the installed driver's own libraries.
    pub own_libraries_only: bool,
    /// The way in which a share's region is mounted.
    pub region: RegionMount,
}

/// The parts of the NVIDIA driver that a container gets, whatever its devices are.
#[derive(Debug, Clone, Copy)]
pub struct OfDriver<'a> {
    /// The driver's files, from which [`spec`] takes those that are wanted.
    pub files: &'a DriverFiles,
    /// The control devices that every result needs.
    pub control: &'a [CharDevice],
}

/// Returns the CDI id of a result.
pub fn device_id(driver: &str, result_id: &str) -> String {
    format!("{driver}/{CLASS}={result_id}")
}

/// Returns the CDI id of the edits common to a claim.
pub fn common_id(driver: &str, uid: &str) -> String {
    format!("{driver}/{CLASS}={uid}-common")
}

/// Returns the name of a claim's spec file without suffix.
pub fn spec_name(driver: &str, uid: &str) -> String {
    format!("{}{uid}", spec_prefix(driver))
}

/// Returns the prefix of the names of all spec files of this driver.
pub fn spec_prefix(driver: &str) -> String {
    format!("{driver}-{CLASS}-")
}

/// Returns true if a spec of this driver has HAMi's indexed variables.
pub fn is_indexed(spec: &Spec) -> bool {
    let names = spec.devices.iter().flat_map(|device| device.container_edits.environment());
    names.into_iter().any(|(name, _)| name.starts_with(INDEXED_MEMORY_ENV))
}

/// Returns true if a device in a spec of this driver is a partition that existed before the claim.
pub fn is_adopted(edits: &ContainerEdits) -> bool {
    edits.environment().into_iter().any(|(name, _)| name.starts_with(ADOPTED_ENV))
}

/// Returns the PCI address of a device in a spec of this driver if the device is a GPU of a virtual machine.
pub fn passed_address(edits: &ContainerEdits) -> Option<String> {
    let mut all = edits.environment().into_iter();
    all.find_map(|(name, value)| name.starts_with(PASSED_ENV).then(|| value.to_owned()))
}

/// Returns the boot in which a spec of this driver was written. Specs of earlier releases do not say.
pub fn boot_id(spec: &Spec) -> Option<String> {
    said(spec, BOOT_ENV)
}

/// Returns the namespace and name of the claim that a spec of this driver belongs to. Specs of earlier
/// releases do not say.
pub fn claim_name(spec: &Spec) -> Option<(String, String)> {
    said(spec, CLAIM_ENV)?.split_once('/').map(|(namespace, name)| (namespace.to_owned(), name.to_owned()))
}

fn said(spec: &Spec, variable: &str) -> Option<String> {
    let mut all = spec.devices.iter().flat_map(|device| device.container_edits.environment());
    all.find_map(|(name, value)| (name == variable).then(|| value.to_owned()))
}

/// Updates the hooks of this driver in a spec. Hooks without an environment get [`HOOK_ENV`]; all hooks get
/// the current timeout and, if `path` is given, that path. Returns true if anything changed.
pub fn renew_hooks(spec: &mut Spec, path: Option<&Path>) -> bool {
    let mut changed = false;
    for Hooked { hook, .. } in hooked(spec) {
        if let Some(name) = hook.args.first_mut().filter(|name| *name == FORMER_HOOK) {
            HOOK.clone_into(name);
            changed = true;
        }
        if hook.env.is_empty() {
            hook.env = HOOK_ENV.map(str::to_owned).into();
            changed = true;
        }
        if hook.timeout != Some(HOOK_TIMEOUT) {
            hook.timeout = Some(HOOK_TIMEOUT);
            changed = true;
        }
        if let Some(path) = path.map(Path::to_string_lossy).filter(|path| *path != hook.path) {
            hook.path = path.into_owned();
            changed = true;
        }
    }
    changed
}

/// Tells the hook of each share which file or directory every mount of its share is, as
/// `<device>:<inode>:<path in the container>`. With this the hook finds out whether something else is mounted
/// over it. Device and inode are the same for every reader, also where the host path cannot be reached, as in
/// a user namespace. Returns true if anything changed.
///
/// # Errors
/// Fails with the error of `identity`, which returns the device and inode of a path on the host. Nothing has
/// changed then.
pub fn tell_mounts<E>(spec: &mut Spec, identity: impl Fn(&str) -> Result<(u64, u64), E>) -> Result<bool, E> {
    let mut told = Vec::new();
    for Hooked { mounts, .. } in hooked(spec).filter(Hooked::is_of_share) {
        let each = mounts.iter().map(|mount| {
            let (device, inode) = identity(&mount.host_path)?;
            Ok([MOUNTED.to_owned(), format!("{device}:{inode}:{}", mount.container_path)])
        });
        told.push(each.collect::<Result<Vec<_>, E>>()?.concat());
    }
    let mut changed = false;
    for (Hooked { hook, .. }, told) in hooked(spec).filter(Hooked::is_of_share).zip(told) {
        let before = hook.args.iter().position(|arg| arg == MOUNTED).unwrap_or(hook.args.len());
        if hook.args.get(before..) != Some(told.as_slice()) {
            hook.args.truncate(before);
            hook.args.extend(told);
            changed = true;
        }
    }
    Ok(changed)
}

/// A hook of this driver, and the mounts of the same edits.
struct Hooked<'a> {
    hook: &'a mut Hook,
    mounts: &'a [Mount],
}

impl Hooked<'_> {
    /// Returns true if the hook sets up the limiter. Only that hook compares mounts.
    fn is_of_share(&self) -> bool {
        self.hook.args.get(1).is_some_and(|task| task == SHARE_TASK)
    }
}

fn hooked(spec: &mut Spec) -> impl Iterator<Item = Hooked<'_>> {
    let Spec { devices, container_edits, .. } = spec;
    let all = devices.iter_mut().map(|device| &mut device.container_edits).chain([container_edits]);
    all.flat_map(|edits| {
        let ContainerEdits { hooks, mounts, .. } = edits;
        let mounts = mounts.as_slice();
        let ours = hooks.iter_mut().filter(|hook| hook.args.first().is_some_and(|name| is_ours(name)));
        ours.map(move |hook| Hooked { hook, mounts })
    })
}

fn is_ours(hook: &str) -> bool {
    [HOOK, FORMER_HOOK, LATER_HOOK].contains(&hook)
}

/// Builds the spec of a claim in this boot, to be completed by [`tell_mounts`].
///
/// # Errors
/// Fails if the driver's name is not a CDI vendor.
pub fn spec(
    site: &Site,
    driver: OfDriver<'_>,
    boot_id: &str,
    claim: &ClaimRef,
    devices: &[(Device, Nodes)],
    ours: Ours<'_>,
    indexed_env: bool,
) -> Result<Spec, NameError> {
    let kind = format!("{}/{CLASS}", site.driver).parse()?;
    let mut capabilities = site.capabilities.clone();
    for (device, _) in devices {
        capabilities.add(&device.driver_capabilities);
        if device.share.is_some() {
            // The limiter is for CUDA, and asks NVML which devices the container has.
            capabilities.add(&DriverCapabilities::usual());
        }
    }
    let files = driver.files.of(&capabilities);
    let own_libraries_only = devices.iter().any(|(_, nodes)| nodes.own_libraries_only);
    let mut cdi = vec![CdiDevice::new(
        format!("{}-common", claim.uid).parse()?,
        common(site, OfDriver { files: &files, ..driver }, own_libraries_only, boot_id, claim),
    )];
    for (device, nodes) in devices {
        cdi.push(CdiDevice::new(
            device.result_id.parse()?,
            of_device(site, device, nodes, ours, indexed_env),
        ));
    }
    Ok(Spec::new(kind, cdi))
}

fn common(
    site: &Site,
    driver: OfDriver<'_>,
    own_libraries_only: bool,
    boot_id: &str,
    claim: &ClaimRef,
) -> ContainerEdits {
    let mut edits = ContainerEdits::default();
    edits.set_env(BOOT_ENV, boot_id);
    edits.set_env(CLAIM_ENV, &format!("{}/{}", claim.namespace, claim.name));
    edits.set_env(NO_DEVICES.0, NO_DEVICES.1);
    let OfDriver { files, control } = driver;
    edits.device_nodes = control.iter().map(node).collect();
    for file in files.libraries.iter().chain(&files.others) {
        let host = file.host.to_string_lossy();
        // Programs and libraries are executed, so no `noexec`; read-only holds, and a socket can be connected to.
        edits
            .mounts
            .extend(file.container.iter().map(|container| Mount::read_only(host.clone(), container.clone())));
    }
    edits.hooks.extend(driver_hook(site, files, own_libraries_only));
    for mount in &site.mounts {
        let (host, container) = (mount.host.to_string_lossy(), mount.container.to_string_lossy());
        edits.mounts.push(if mount.writable {
            Mount::read_write(host, container)
        } else {
            Mount::read_only(host, container)
        });
    }
    edits
}

/// Builds the hook that makes the libraries known to the container's loader and `ldconfig -p`, and does
/// whatever else mounts cannot do.
fn driver_hook(site: &Site, files: &DriverFiles, own_libraries_only: bool) -> Option<Hook> {
    let mut args = vec![DRIVER_TASK.to_owned(), "--version".to_owned(), files.version.clone()?];
    let [dir, _] = container_library_dirs();
    args.extend(["--dir".to_owned(), dir.clone()]);
    args.extend(names_in(files, &dir).flat_map(|name| ["--library".to_owned(), name]));
    let plain = args.len();
    if own_libraries_only {
        args.push("--without-compat".to_owned());
    }
    let mut of_32_bit = names_in(files, CONTAINER_LIBRARY_DIR_32).peekable();
    if of_32_bit.peek().is_some() {
        args.extend(["--dir32".to_owned(), CONTAINER_LIBRARY_DIR_32.to_owned()]);
        args.extend(of_32_bit.flat_map(|name| ["--library32".to_owned(), name]));
    }
    let name = if args.len() > plain { LATER_HOOK } else { HOOK };
    let mut hook = hook(site, args)?;
    name.clone_into(hook.args.first_mut()?);
    Some(hook)
}

/// Returns the names of the libraries directly in a directory of the container, not below it.
fn names_in<'a>(files: &'a DriverFiles, dir: &'a str) -> impl Iterator<Item = String> + 'a {
    let inside = move |path: &String| Some(path.strip_prefix(dir)?.strip_prefix('/')?.to_owned());
    let paths = files.libraries.iter().flat_map(|file| &file.container);
    paths.filter_map(inside).filter(|name| !name.contains('/'))
}

/// Builds the hook that makes the links to DRM nodes, which a CDI spec cannot express.
fn link_hook(site: &Site, drm: &[DrmNode]) -> Option<Hook> {
    let links = drm.iter().flat_map(|node| ["--link".to_owned(), format!("{}:{}", node.target, node.link)]);
    let task = (!drm.is_empty()).then(|| LINK_TASK.to_owned())?;
    let mut hook = hook(site, [task].into_iter().chain(links))?;
    LATER_HOOK.clone_into(hook.args.first_mut()?);
    Some(hook)
}

/// Builds a hook of this driver, or returns `None` if the node has no hook program.
fn hook(site: &Site, arguments: impl IntoIterator<Item = String>) -> Option<Hook> {
    Some(Hook {
        hook_name: HookName::CreateContainer,
        path: site.oci_hook.as_ref()?.to_string_lossy().into_owned(),
        args: [HOOK.to_owned()].into_iter().chain(arguments).collect(),
        env: HOOK_ENV.map(str::to_owned).into(),
        timeout: Some(HOOK_TIMEOUT),
    })
}

/// Builds a device node. With type and number given, nothing is looked up on the host. Containers have no
/// reason to make nodes themselves, so `m` is not permitted.
fn node(device: &CharDevice) -> DeviceNode {
    let mut node = DeviceNode::character(device.path.clone(), device.major, device.minor);
    node.permissions = Some("rw".to_owned());
    node
}

fn of_device(
    site: &Site,
    device: &Device,
    nodes: &Nodes,
    ours: Ours<'_>,
    indexed_env: bool,
) -> ContainerEdits {
    let drm = nodes.drm.iter().map(|drm| &drm.device);
    let device_nodes = nodes.devices.iter().chain(drm).map(node).collect();
    let mut edits = ContainerEdits { device_nodes, ..ContainerEdits::default() };
    let tail = device.result_id.rsplit('-').next().unwrap_or_default();
    let uuid = device.uuid().unwrap_or(device.gpu.as_str());
    edits.set_env(&format!("{DEVICE_ENV}{tail}"), &format!("{}={uuid}", device.device));
    if device.partition.as_ref().is_some_and(|partition| partition.adopted) {
        edits.set_env(&format!("{ADOPTED_ENV}{tail}"), "true");
    }
    edits.hooks.extend(link_hook(site, &nodes.drm));
    if let Some(passed) = &device.passed {
        edits.set_env(&format!("{PASSED_ENV}{tail}"), &passed.address);
        // Without the edits that are common to a claim, which are about the driver.
        edits.set_env(NO_DEVICES.0, NO_DEVICES.1);
    }
    if let Some(share) = &device.share {
        share_env(&mut edits, uuid, share, tail, indexed_env);
        if let Some(limiter) = ours.limiter {
            mount_limiter(&mut edits, site, device, nodes.region, limiter);
        }
    }
    if let Some(daemon) = ours.daemon.filter(|_| device.mps.is_some()) {
        share_with_daemon(&mut edits, daemon);
    }
    edits
}

/// Adds the variable and mounts that a program shares with the claim's MPS daemon. CUDA looks for the sockets
/// there also without the variable. Every device of the claim adds the same edits, as there is one daemon.
fn share_with_daemon(edits: &mut ContainerEdits, daemon: &ClaimDir) {
    edits.set_env("CUDA_MPS_PIPE_DIRECTORY", PIPE_DIR);
    edits.mounts.extend([
        Mount::read_write(daemon.pipe().to_string_lossy(), PIPE_DIR),
        Mount::read_write(daemon.shm().to_string_lossy(), "/dev/shm"),
    ]);
}

/// Adds informational variables; the quota file is what counts.
fn share_env(edits: &mut ContainerEdits, uuid: &str, share: &Share, tail: &str, indexed: bool) {
    let Share { consumed, order, .. } = share;
    edits.set_env(
        &format!("ALIQUOT_SHARE_{tail}"),
        &format!("uuid={uuid},memory={},cores={}", consumed.memory_bytes, consumed.cores_percent),
    );
    if indexed {
        let mebibytes = consumed.memory_bytes >> 20;
        edits.set_env(&format!("{INDEXED_MEMORY_ENV}{order}"), &format!("{mebibytes}m"));
        if consumed.cores_percent > 0 {
            edits.set_env(&format!("CUDA_DEVICE_SM_LIMIT_{order}"), &consumed.cores_percent.to_string());
        }
    }
}

fn mount_limiter(
    edits: &mut ContainerEdits,
    site: &Site,
    device: &Device,
    region: RegionMount,
    limiter: &Limiter,
) {
    let id = &device.result_id;
    let share = site.shares_dir.join(id);
    let inside = format!("{LIMITER_DIR}/{}", limiter.version);
    let host = |name: &str| limiter.host_dir.join(name).to_string_lossy().into_owned();
    let region = match region {
        RegionMount::File => {
            let host = share.join("region/region");
            Mount::read_write(host.to_string_lossy(), format!("{REGION_DIR}/{id}/region"))
        }
        RegionMount::Directory => {
            Mount::read_write(share.join("region").to_string_lossy(), format!("{REGION_DIR}/{id}"))
        }
    };
    edits.mounts.extend([
        Mount::read_only(host(PRELOAD), format!("{inside}/{PRELOAD}")),
        Mount::read_only(host(CORE), format!("{inside}/{CORE}")),
        Mount::read_only(limiter.preload_file.to_string_lossy(), "/etc/ld.so.preload"),
        Mount::read_only(share.join("quota").to_string_lossy(), format!("{QUOTA_DIR}/{id}")),
        region,
    ]);
    let stub = format!("{inside}/{PRELOAD}");
    edits.hooks.extend(hook(site, [SHARE_TASK.to_owned(), "--limiter".to_owned(), stub]));
}

#[cfg(test)]
#[path = "edits/tests.rs"]
mod tests;
