//! Where our spec differs from NVIDIA's, and why.

/// A difference.
pub(crate) struct Difference {
    /// The line, or with a `*` at its end what the line begins with.
    pub(crate) what: &'static str,
    /// Why.
    pub(crate) why: &'static str,
    /// Whether it is only where the root has nothing but the driver.
    pub(crate) own_root: bool,
}

const fn known(what: &'static str, why: &'static str) -> Difference {
    Difference { what, why, own_root: false }
}

/// One of a root that has nothing but the driver.
const fn in_own_root(what: &'static str, why: &'static str) -> Difference {
    Difference { what, why, own_root: true }
}

pub(crate) const DIFFERENCES: &[Difference] = &[
    known(
        "theirs: hook create-symlinks",
        "each name of a library is a mount of its file; links to DRM nodes are made by a hook of their own",
    ),
    known("theirs: hook update-ldcache", "our hook does it (driver), without running the host's ldconfig"),
    known(
        "theirs: hook enable-cuda-compat",
        "our hook does it (driver), in the same cache, and not for GPUs on which CUDA refuses such libraries",
    ),
    known("theirs: hook disable-device-node-modification", "our hook does it (driver)"),
    known(
        "theirs: hook update-application-profile",
        "it names the GPUs that EGL may use; EGL sees those alone whose device nodes the container has",
    ),
    known(
        "theirs: hook apply-cuda-memory-limits",
        "limits for memory that GPU and processor share; our limits are claimed and kept by the limiter",
    ),
    known("ours: hook driver", "the cache, forward compatibility and the driver's parameters in one"),
    known("theirs: env NVIDIA_CTK_LIBCUDA_DIR", "for NVIDIA's own runtime, which is not in our path"),
    known(
        "ours: library libnvidia-egl-*",
        "the names that programs load; theirs come into being with the host's ldconfig in the container",
    ),
    known(
        "ours: file /usr/bin/nvidia-smi",
        "on Debian it is an absolute link, which their generator does not follow in the driver's root",
    ),
    known(
        "ours: file /usr/share/nvidia/nvidia-application-profiles-*",
        "the driver's own settings for known programs, which its libraries look for by this name",
    ),
    known("both: file /run/nvidia-*", "a socket can be connected to on a read-only mount as well"),
    known("ours: env ALIQUOT_*", "what our containers are told of their devices"),
    known("ours: hook link", "links to DRM nodes; theirs are made by the same hook as those of libraries"),
    in_own_root(
        "theirs: file /bin/*",
        "programs lie in bin of such a root; ours are where every image looks for them",
    ),
    in_own_root(
        "ours: file /usr/share/*",
        "at the top of such a root, where their generator looks for Vulkan's alone",
    ),
    known("both: node /dev/*", "no container makes device nodes, so ours have no m"),
];
