//! The variants of the driver: what real drivers differ in, or what is not known of them.
//!
//! Read once per process from `<node directory>/cuda.conf` (lines `key = value`, `#` comments) and then from the
//! environment (`ALIQUOT_SIM_CUDA="key=value,key=value"`), which wins. README.md has the list.

use std::path::Path;

use aliquot_sim_node::compute::Slices;

const MIB: u64 = 1 << 20;

/// Parameters of this process's driver.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Config {
    /// `resolver=alias`: `cuGetProcAddress` answers with other addresses than the exports have.
    pub(crate) resolver_aliases: bool,
    /// Bytes of a context; `None` follows the board (4 MiB per multiprocessor).
    pub(crate) context_bytes: Option<u64>,
    /// Multiprocessors as programs are told, whose number a context's size follows; `None` are the board's.
    pub(crate) multiprocessors: Option<u32>,
    /// What small allocations are cut from.
    pub(crate) slab_bytes: u64,
    /// Largest allocation that is cut from a slab.
    pub(crate) small_bytes: u64,
    /// Least growth of a memory pool.
    pub(crate) pool_chunk_bytes: u64,
    /// Launches that can be outstanding on a stream before the next one blocks.
    pub(crate) launch_queue: usize,
    /// Time slice while several contexts have work.
    pub(crate) slice_ns: u64,
    /// Cost of a switch between contexts.
    pub(crate) switch_ns: u64,
    /// Host time that every call takes.
    pub(crate) call_ns: u64,
    /// Factor on all simulated durations.
    pub(crate) time_scale: f64,
    /// Host memory that may hold the content of device memory.
    pub(crate) backing_bytes: usize,
    /// `module_load=eager`: a module's memory is taken when it is loaded, not at the first use of a function.
    pub(crate) eager_modules: bool,
    /// Bytes that code takes at the least when it is loaded.
    pub(crate) module_bytes: u64,
    /// Gigabytes a second between host and device.
    pub(crate) host_gbps: f64,
    /// Gigabytes a second inside the device.
    pub(crate) device_gbps: f64,
    /// GPU time of a kernel that declares none.
    pub(crate) kernel_ns: u64,
    /// `free_syncs=0`: `cuMemFree` does not wait for outstanding work.
    pub(crate) free_syncs: bool,
    /// Overrides the node's CUDA version.
    pub(crate) cuda_version: Option<i32>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            resolver_aliases: false,
            context_bytes: None,
            multiprocessors: None,
            slab_bytes: 2 * MIB,
            small_bytes: MIB,
            pool_chunk_bytes: 32 * MIB,
            launch_queue: 1024,
            slice_ns: 2_000_000,
            switch_ns: 0,
            call_ns: 0,
            time_scale: 1.0,
            backing_bytes: 256 << 20,
            eager_modules: false,
            module_bytes: 2 * MIB,
            host_gbps: 25.0,
            device_gbps: 1000.0,
            kernel_ns: 5_000,
            free_syncs: true,
            cuda_version: None,
        }
    }
}

impl Config {
    /// The node's parameters, then the process's.
    pub(crate) fn load(node_dir: Option<&Path>) -> Self {
        let mut config = Self::default();
        let file =
            node_dir.and_then(|dir| std::fs::read_to_string(dir.join("cuda.conf")).ok()).unwrap_or_default();
        config.apply_all(file.lines().map(|line| line.split('#').next().unwrap_or_default()));
        if let Ok(text) = std::env::var("ALIQUOT_SIM_CUDA") {
            config.apply_all(text.split(','));
        }
        if let Ok(scale) = std::env::var("ALIQUOT_SIM_TIME_SCALE") {
            config.apply("time_scale", &scale);
        }
        config
    }

    fn apply_all<'t>(&mut self, settings: impl Iterator<Item = &'t str>) {
        for (key, value) in settings.filter_map(|s| s.split_once('=')) {
            if !self.apply(key.trim(), value.trim()) {
                eprintln!("libcuda stand-in: ignoring the setting {:?} = {:?}", key.trim(), value.trim());
            }
        }
    }

    /// Whether the key exists and the value can be read.
    fn apply(&mut self, key: &str, value: &str) -> bool {
        let number = value.parse::<u64>().ok();
        let real = value.parse::<f64>().ok().filter(|v| v.is_finite() && *v > 0.0);
        let done = match key {
            "resolver" => match value {
                "same" | "alias" => {
                    self.resolver_aliases = value == "alias";
                    Some(())
                }
                _ => None,
            },
            "module_load" => match value {
                "lazy" | "eager" => {
                    self.eager_modules = value == "eager";
                    Some(())
                }
                _ => None,
            },
            "context_mib" => number.map(|n| self.context_bytes = Some(n * MIB)),
            "multiprocessors" => value.parse().ok().map(|n| self.multiprocessors = Some(n)),
            "slab_kib" => number.filter(|n| *n >= 64).map(|n| self.slab_bytes = n << 10),
            "small_kib" => number.map(|n| self.small_bytes = n << 10),
            "pool_chunk_kib" => number.filter(|n| *n >= 64).map(|n| self.pool_chunk_bytes = n << 10),
            "launch_queue" => number.map(|n| self.launch_queue = usize::try_from(n.max(1)).unwrap_or(1024)),
            "slice_us" => number.map(|n| self.slice_ns = n * 1000),
            "switch_us" => number.map(|n| self.switch_ns = n * 1000),
            "call_ns" => number.map(|n| self.call_ns = n),
            "time_scale" => real.map(|r| self.time_scale = r),
            "backing_mib" => {
                number.map(|n| self.backing_bytes = usize::try_from(n << 20).unwrap_or(usize::MAX))
            }
            "module_kib" => number.map(|n| self.module_bytes = n << 10),
            "host_gbps" => real.map(|r| self.host_gbps = r),
            "device_gbps" => real.map(|r| self.device_gbps = r),
            "kernel_us" => real.map(|r| self.kernel_ns = ns_of(r * 1e3)),
            "free_syncs" => number.map(|n| self.free_syncs = n != 0),
            "cuda_version" => value.parse().ok().map(|v| self.cuda_version = Some(v)),
            _ => None,
        };
        done.is_some()
    }

    /// How contexts take turns on a device, where the administrator has set nothing else.
    pub(crate) fn slices(&self) -> Slices {
        Slices { slice_ns: self.scaled(self.slice_ns), switch_ns: self.scaled(self.switch_ns) }
    }

    /// A simulated duration as it passes on the wall clock.
    pub(crate) fn scaled(&self, ns: u64) -> u64 {
        #[expect(clippy::cast_precision_loss, reason = "durations are far below 2^52 ns")]
        let real = ns as f64 * self.time_scale;
        ns_of(real)
    }

    /// How long moving that many bytes takes, on the wall clock.
    pub(crate) fn transfer_ns(&self, bytes: u64, gbps: f64) -> u64 {
        #[expect(clippy::cast_precision_loss, reason = "an estimate")]
        let real = (2_000.0 + bytes as f64 / gbps) * self.time_scale;
        ns_of(real)
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped to the range")]
fn ns_of(real: f64) -> u64 {
    real.clamp(0.0, 9.0e18) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_later_setting_wins_and_unknown_ones_are_left_out() {
        let mut config = Config::default();
        config.apply_all("resolver = alias,slab_kib=128,nonsense=1,time_scale=0,slab_kib=256".split(','));
        assert!(config.resolver_aliases);
        assert_eq!(config.slab_bytes, 256 << 10);
        assert!((config.time_scale - 1.0).abs() < f64::EPSILON, "a scale of zero would stop time");
    }

    #[test]
    fn durations_scale() {
        let config = Config { time_scale: 0.1, ..Config::default() };
        assert_eq!(config.scaled(5_000_000), 500_000);
        assert_eq!(config.transfer_ns(25_000_000_000, 25.0), 100_000_200);
    }
}
