//! Taints on devices, except those for the health of a GPU, with the purpose of each.

/// A taint that a node's devices may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceTaint {
    /// The part of the key after the driver's name and a slash.
    pub what: &'static str,
    /// The effect, or effects.
    pub effect: &'static str,
    /// True if no claim may tolerate the taint, so that it keeps the device from everybody.
    pub is_reserved: bool,
    /// The meaning of the taint, and what ends it.
    pub about: &'static str,
}

const CONTROLLER: DeviceTaint = DeviceTaint {
    what: "controller-allocated",
    effect: "NoSchedule",
    is_reserved: true,
    about: "The controller gives the device out, and kube-scheduler does not. With value `hand-over` neither does: the \
            node goes from one to the other.",
};
const HELD: DeviceTaint = DeviceTaint {
    what: "held",
    effect: "NoSchedule",
    is_reserved: true,
    about: "The hardware is still held: for a claim that no longer exists, or because containers can open it by a \
            number that it did not have before. It goes when that has ended.",
};
const CORDONED: DeviceTaint = DeviceTaint {
    what: "cordoned",
    effect: "NoSchedule; NoExecute with `--evict`",
    is_reserved: false,
    about: "An administrator took the GPU out of service (`aliquot cordon`), until `aliquot uncordon`.",
};
const DRIVER_PAUSED: DeviceTaint = DeviceTaint {
    what: "driver-paused",
    effect: "NoSchedule",
    is_reserved: true,
    about: "The GPU operator asks for the driver by a label of the Node, until that label says otherwise.",
};
const OTHER_DRIVER: DeviceTaint = DeviceTaint {
    what: "other-driver",
    effect: "NoSchedule",
    is_reserved: true,
    about: "A device plugin, or another DRA driver, gives out GPUs of the node, too, or a pod still has some from it.",
};

/// All taints.
pub const TAINTS: [DeviceTaint; 5] = [CONTROLLER, HELD, CORDONED, DRIVER_PAUSED, OTHER_DRIVER];

/// Returns true if no claim may tolerate a taint with this key.
pub fn is_reserved_taint(driver: &str, key: &str) -> bool {
    let what = key.strip_prefix(driver).and_then(|rest| rest.strip_prefix('/'));
    what.is_some_and(|what| TAINTS.iter().any(|taint| taint.is_reserved && taint.what == what))
}

/// Returns the key of the taint that reserves a device for the controller and keeps kube-scheduler away from
/// it.
pub fn controller_taint(driver: &str) -> String {
    condition_taint(driver, CONTROLLER.what)
}

/// Returns the key of the taint on devices whose hardware is held for a claim that no longer exists.
pub fn held_taint(driver: &str) -> String {
    condition_taint(driver, HELD.what)
}

/// Returns the key of the taint on devices of a GPU that an administrator took out of service (see
/// [`crate::cordon`]).
pub fn cordoned_taint(driver: &str) -> String {
    condition_taint(driver, CORDONED.what)
}

/// Returns the key of the taint on all devices while the driver is to be unloaded.
pub fn driver_paused_taint(driver: &str) -> String {
    condition_taint(driver, DRIVER_PAUSED.what)
}

/// Returns the key of the taint on all devices while another driver also allocates the node's GPUs.
pub fn other_driver_taint(driver: &str) -> String {
    condition_taint(driver, OTHER_DRIVER.what)
}

/// Returns the key of a taint for a condition of a GPU: `<driver>/<what>`, like those of NVIDIA's driver
/// (`gpu.nvidia.com/xid`, `…/gpu-lost`, `…/unmonitored`).
pub fn condition_taint(driver: &str, what: &str) -> String {
    format!("{driver}/{what}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn admission_refuses_to_tolerate_exactly_what_is_reserved() {
        let manifests = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/manifests/aliquot.yaml");
        let manifests = std::fs::read_to_string(manifests).expect("the rendered chart");
        let mut objects = manifests.split("\n---\n");
        let policy =
            objects.find(|object| object.contains("\n  name: aliquot-tolerations\n")).expect("the policy");
        let driver = crate::names::DEFAULT_DRIVER;
        for taint in TAINTS {
            let key = format!("'{}'", condition_taint(driver, taint.what));
            assert_eq!(policy.contains(&key), taint.is_reserved, "{key}");
            assert_eq!(is_reserved_taint(driver, key.trim_matches('\'')), taint.is_reserved, "{key}");
        }
        assert!(!is_reserved_taint("another.example.com", &held_taint(driver)));
    }
}
