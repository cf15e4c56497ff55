//! Queries to the driver and NVML.

use super::Probe;
use super::driver::{at, find, text};

impl Probe {
    pub fn queries(&mut self, verb: &[&str]) -> Option<String> {
        let (driver, device) = (&self.driver, self.device as u64);
        Some(match *verb {
            ["info"] => {
                let (mut free, mut total) = (0_u64, 0_u64);
                let code = driver.call("cuMemGetInfo_v2", &[at(&mut free), at(&mut total)]);
                format!("{code} {free} {total}")
            }
            ["total"] => {
                let mut total = 0_u64;
                let code = driver.call("cuDeviceTotalMem_v2", &[at(&mut total), device]);
                format!("{code} {total}")
            }
            ["uuid"] => {
                let mut uuid = [0_u8; 16];
                let code = driver.call("cuDeviceGetUuid_v2", &[at(&mut uuid), device]);
                format!("{code} {}", uuid.map(|byte| format!("{byte:02x}")).concat())
            }
            ["nvml", ref named @ ..] => {
                let (handle, mut v1, mut v2) = (self.nvml_device(named), [0_u64; 3], [0_u64; 5]);
                v2[0] = 2 << 24 | 40;
                let first = driver.call("nvmlDeviceGetMemoryInfo", &[handle, at(&mut v1)]);
                let second = driver.call("nvmlDeviceGetMemoryInfo_v2", &[handle, at(&mut v2)]);
                assert_eq!([v1[0], v1[1], v1[2]], [v2[1], v2[3], v2[4]], "both versions agree");
                format!("{} {} {} {}", first.max(second), v1[0], v1[1], v1[2])
            }
            ["processes", ref named @ ..] => self.processes(named),
            ["busy", ref named @ ..] => self.busy(named),
            ["weak", symbol] => (!find(libc::RTLD_DEFAULT, symbol).is_null()).to_string(),
            ["call", symbol] => driver.call(symbol, &[]).to_string(),
            _ => return None,
        })
    }

    /// Returns the device of this UUID; without a UUID, the device as programs find theirs.
    fn nvml_device(&self, named: &[&str]) -> u64 {
        let [uuid] = named else { return self.driver.libraries.nvml_device(self.device as u64) };
        let mut handle = 0_u64;
        self.driver.ok("nvmlInit_v2", &[]);
        self.driver.ok("nvmlDeviceGetHandleByUUID", &[text(uuid).as_ptr() as u64, at(&mut handle)]);
        handle
    }

    /// Returns the pids that NVML lists, which all versions of its function agree on, and this process's own;
    /// or the code that they all refuse with.
    fn processes(&self, named: &[&str]) -> String {
        let (driver, device, mut found) = (&self.driver, self.nvml_device(named), Vec::new());
        for (symbol, words) in [
            ("nvmlDeviceGetComputeRunningProcesses", 2),
            ("nvmlDeviceGetComputeRunningProcesses_v2", 3),
            ("nvmlDeviceGetComputeRunningProcesses_v3", 3),
        ] {
            let (mut count, mut records) = (64_u32, [0_u64; 192]);
            let code = driver.call(symbol, &[device, at(&mut count), at(&mut records)]);
            if code != 0 {
                assert!(records.iter().all(|word| *word == 0), "nothing is told");
                found.push(vec![code as u64]);
                continue;
            }
            let pids: Vec<u64> = (0..count as usize).map(|i| records[i * words] & 0xffff_ffff).collect();
            let mut none = 0_u32;
            let code = driver.call(symbol, &[device, at(&mut none), 0]);
            assert_eq!((code, none), (if count > 0 { 7 } else { 0 }, count), "a count is told");
            found.push(pids);
        }
        assert!(found[0] == found[1] && found[1] == found[2], "all versions agree: {found:?}");
        format!("{:?} {}", found[0], std::process::id())
    }

    /// Returns the pids that NVML has utilisation of, from the one function after the other, or its code.
    fn busy(&self, named: &[&str]) -> String {
        let (driver, device, mut count) = (&self.driver, self.nvml_device(named), 64_u32);
        let mut samples = [0_u64; 4 * 64];
        let arguments = [device, at(&mut samples), at(&mut count), 0];
        let first = match driver.call("nvmlDeviceGetProcessUtilization", &arguments) {
            0 => Ok((0..count as usize).map(|i| samples[i * 4] & 0xffff_ffff).collect::<Vec<_>>()),
            code => Err(code),
        };
        let mut infos = [0_u64; 5 * 64];
        let mut list = [64 << 32 | 1 << 24 | 24, 0, at(&mut infos)];
        let second = match driver.call("nvmlDeviceGetProcessesUtilizationInfo", &[device, at(&mut list)]) {
            0 => {
                let count = (list[0] >> 32) as usize;
                Ok((0..count).map(|i| infos[i * 5 + 1] & 0xffff_ffff).collect::<Vec<_>>())
            }
            code => Err(code),
        };
        format!("{first:?} {second:?} {}", std::process::id())
    }
}
