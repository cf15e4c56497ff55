//! Taints on devices, beside those for the health of a GPU, each with what it is for.

/// A taint that a node's devices may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceTaint {
    /// The part of its key after the driver's name and a slash.
    pub what: &'static str,
    /// Its effect, or effects.
    pub effect: &'static str,
    /// What it means, and what ends it.
    pub about: &'static str,
}

const CONTROLLER: DeviceTaint = DeviceTaint {
    what: "controller-allocated",
    effect: "NoSchedule",
    about: "The controller gives the device out, and kube-scheduler does not. With value `hand-over` neither does: the \
            node goes from one to the other. No claim may tolerate it.",
};
const HELD: DeviceTaint = DeviceTaint {
    what: "held",
    effect: "NoSchedule",
    about: "The hardware is still held: for a claim that no longer exists, or because containers can open it by a \
            number that it did not have before. It goes when that has ended.",
};
const CORDONED: DeviceTaint = DeviceTaint {
    what: "cordoned",
    effect: "NoSchedule; NoExecute with `--evict`",
    about: "An administrator took the GPU out of service (`aliquot cordon`), until `aliquot uncordon`.",
};
const DRIVER_PAUSED: DeviceTaint = DeviceTaint {
    what: "driver-paused",
    effect: "NoSchedule",
    about: "The GPU operator asks for the driver by a label of the Node, until that label says otherwise.",
};

/// All of them.
pub const TAINTS: [DeviceTaint; 4] = [CONTROLLER, HELD, CORDONED, DRIVER_PAUSED];

/// Key of the taint that hands a device to our controller and keeps kube-scheduler off it.
pub fn controller_taint(driver: &str) -> String {
    condition_taint(driver, CONTROLLER.what)
}

/// Key of the taint on devices whose hardware is held by a claim that no longer exists.
pub fn held_taint(driver: &str) -> String {
    condition_taint(driver, HELD.what)
}

/// Key of the taint on devices of a GPU that an administrator took out of service (see [`crate::cordon`]).
pub fn cordoned_taint(driver: &str) -> String {
    condition_taint(driver, CORDONED.what)
}

/// Key of the taint on everything while the driver is to be unloaded.
pub fn driver_paused_taint(driver: &str) -> String {
    condition_taint(driver, DRIVER_PAUSED.what)
}

/// Key of a taint for what is the matter with a GPU: `<driver>/<what>`, as NVIDIA's driver has it for its own
/// (`gpu.nvidia.com/xid`, `…/gpu-lost`, `…/unmonitored`).
pub fn condition_taint(driver: &str, what: &str) -> String {
    format!("{driver}/{what}")
}
