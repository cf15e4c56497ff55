//! The kubelet's gRPC APIs: plugin registration, DRA, DRA health, pod resources and, for tests, device plugins.
//!
//! Generated from the `.proto` files under `kubelet/` by protox and tonic; `UPSTREAM.md` says where
//! their facts come from. Nothing here is written by hand but names: no types, no logic.
//! Clients are built too, for tests and tools that play the kubelet.
//!
//! Start reading at [`pluginregistration::v1`], then [`dra::v1`].
#![forbid(unsafe_code)]

/// The `type` of a plugin that drives dynamic resources, as `GetInfo` answers it.
pub const PLUGIN_TYPE_DRA: &str = "DRAPlugin";

/// Names under which services are listed in `PluginInfo.supported_versions`. The kubelet takes the
/// first one in the plugin's order that it knows, so a newer version goes before an older one.
/// They are not the names on the gRPC path: those carry the whole package.
pub mod registered {
    /// The DRA service of Kubernetes 1.34 and newer.
    pub const DRA_V1: &str = "v1.DRAPlugin";
    /// The DRA service of Kubernetes 1.32 and newer.
    pub const DRA_V1BETA1: &str = "v1beta1.DRAPlugin";
    /// The health service of Kubernetes 1.37 and newer.
    pub const HEALTH_V1: &str = "v1.DRAResourceHealth";
    /// The health service of Kubernetes 1.34 and newer.
    pub const HEALTH_V1ALPHA1: &str = "v1alpha1.DRAResourceHealth";
    /// Everything we serve, in the order of preference.
    pub const ALL: [&str; 4] = [DRA_V1, DRA_V1BETA1, HEALTH_V1, HEALTH_V1ALPHA1];
}

macro_rules! api {
    ($(#[$doc:meta])* $version:ident, $folder:literal, $file:literal) => {
        $(#[$doc])*
        #[allow(missing_docs, unreachable_pub, clippy::all, clippy::or_fun_call, reason = "generated code")]
        pub mod $version {
            include!(concat!(env!("OUT_DIR"), "/", $folder, "/", $file));
        }
    };
}

/// How a plugin introduces itself to the kubelet.
pub mod pluginregistration {
    api!(
        /// The only version in use.
        v1,
        "pluginregistration_v1",
        "pluginregistration.rs"
    );
}

/// Preparing and unpreparing the devices of claims.
pub mod dra {
    api!(
        /// Kubernetes 1.34 and newer.
        v1,
        "dra_v1",
        "k8s.io.kubelet.pkg.apis.dra.v1.rs"
    );
    api!(
        /// Kubernetes 1.32 and newer: as `v1`, without the share of a device.
        v1beta1,
        "dra_v1beta1",
        "k8s.io.kubelet.pkg.apis.dra.v1beta1.rs"
    );
}

/// The health of devices, as the kubelet shows it in pods.
pub mod dra_health {
    api!(
        /// Kubernetes 1.37 and newer.
        v1,
        "dra_health_v1",
        "v1.rs"
    );
    api!(
        /// Kubernetes 1.34 and newer; the same messages as `v1`.
        v1alpha1,
        "dra_health_v1alpha1",
        "v1alpha1.rs"
    );
}

/// What the kubelet gave to which pod.
pub mod podresources {
    api!(
        /// The only version in use.
        v1,
        "podresources_v1",
        "v1.rs"
    );
}

/// How device plugins speak to the kubelet. Ours is none: tests run one beside us.
pub mod deviceplugin {
    api!(
        /// The only version in use.
        v1beta1,
        "deviceplugin_v1beta1",
        "v1beta1.rs"
    );
}
