//! Memory by family: allocates it, frees it, and finds out how much there is.

use super::driver::at;
use super::{MIB, Probe, size};

/// An allocation, and how it is given back.
#[derive(Clone, Debug)]
pub enum Held {
    Plain(u64),
    Async(u64),
    AsyncThread(u64),
    Array(u64),
    Handle(u64),
    Mapped { address: u64, bytes: u64 },
}

impl Probe {
    pub fn allocate(&self, family: &str, bytes: u64) -> Result<Held, i32> {
        let mut out = 0_u64;
        let driver = &self.driver;
        let done = |code: i32, held: Held| if code == 0 { Ok(held) } else { Err(code) };
        match family {
            "linear" => done(driver.call("cuMemAlloc_v2", &[at(&mut out), bytes]), Held::Plain(out)),
            "managed" => done(driver.call("cuMemAllocManaged", &[at(&mut out), bytes, 1]), Held::Plain(out)),
            "pitched" => {
                let (mut pitch, rows) = (0_u64, bytes / 4096);
                let code = driver.call("cuMemAllocPitch_v2", &[at(&mut out), at(&mut pitch), 4096, rows, 4]);
                done(code, Held::Plain(out))
            }
            "async" => done(driver.call("cuMemAllocAsync", &[at(&mut out), bytes, 0]), Held::Async(out)),
            "async_ptsz" => {
                done(driver.call("cuMemAllocAsync_ptsz", &[at(&mut out), bytes, 0]), Held::AsyncThread(out))
            }
            "array" => {
                // One byte a texel, rows of 64 KiB.
                let descriptor: [u64; 3] = [65536, bytes / 65536, 1 << 32 | 1];
                let code = driver.call("cuArrayCreate_v2", &[at(&mut out), descriptor.as_ptr() as u64]);
                done(code, Held::Array(out))
            }
            "vmm" | "mapped" => {
                let mut properties = [0_u32; 8];
                (properties[0], properties[2], properties[3]) = (1, 1, self.device as u32);
                let code = driver.call("cuMemCreate", &[at(&mut out), bytes, properties.as_ptr() as u64, 0]);
                if family == "vmm" || code != 0 {
                    return done(code, Held::Handle(out));
                }
                let mut address = 0_u64;
                driver.ok("cuMemAddressReserve", &[at(&mut address), bytes, 0, 0, 0]);
                driver.ok("cuMemMap", &[address, bytes, 0, out, 0]);
                // The handle goes at once; the mapping keeps the memory.
                driver.ok("cuMemRelease", &[out]);
                Ok(Held::Mapped { address, bytes })
            }
            other => panic!("no family {other}"),
        }
    }

    pub fn free(&self, held: &Held) -> i32 {
        let driver = &self.driver;
        match *held {
            Held::Plain(address) => driver.call("cuMemFree_v2", &[address]),
            Held::Async(address) => {
                let code = driver.call("cuMemFreeAsync", &[address, 0]);
                code.max(driver.call("cuStreamSynchronize", &[0]))
            }
            Held::AsyncThread(address) => {
                let code = driver.call("cuMemFreeAsync_ptsz", &[address, 0]);
                code.max(driver.call("cuStreamSynchronize_ptsz", &[0]))
            }
            Held::Array(handle) => driver.call("cuArrayDestroy", &[handle]),
            Held::Handle(handle) => driver.call("cuMemRelease", &[handle]),
            Held::Mapped { address, bytes } => driver.call("cuMemUnmap", &[address, bytes]),
        }
    }

    pub fn memory(&mut self, verb: &[&str]) -> Option<String> {
        Some(match *verb {
            ["alloc", family, bytes] => match self.allocate(family, size(bytes)) {
                Ok(new) => {
                    self.held.push(new);
                    "0".to_owned()
                }
                Err(code) => code.to_string(),
            },
            ["free"] => {
                let last = self.held.pop().unwrap();
                self.free(&last).to_string()
            }
            ["free_async"] => match self.held.pop().unwrap() {
                Held::Plain(address) => self.driver.call("cuMemFreeAsync", &[address, 0]).to_string(),
                other => panic!("{other:?}"),
            },
            ["free_sync"] => match self.held.pop().unwrap() {
                Held::Async(address) => self.driver.call("cuMemFree_v2", &[address]).to_string(),
                other => panic!("{other:?}"),
            },
            ["freeall"] => {
                let all = std::mem::take(&mut self.held);
                all.iter().map(|held| self.free(held)).max().unwrap_or(0).to_string()
            }
            // How many allocations of a size succeed, and with which code the next one fails.
            ["fill", family, bytes] => loop {
                match self.allocate(family, size(bytes)) {
                    Ok(new) => self.held.push(new),
                    Err(code) => break format!("{} {code}", self.held.len()),
                }
            },
            ["bisect", family, grain] => self.bisect(family, size(grain)).to_string(),
            // Allocates and frees every so often until that is refused: after how many milliseconds, or
            // never.
            ["refused", family, bytes, every] => {
                let started = std::time::Instant::now();
                loop {
                    match self.allocate(family, size(bytes)) {
                        Ok(new) => assert_eq!(self.free(&new), 0),
                        Err(_) => break started.elapsed().as_millis().to_string(),
                    }
                    if started.elapsed().as_secs() >= 20 {
                        break "never".to_owned();
                    }
                    std::thread::sleep(std::time::Duration::from_millis(every.parse().unwrap()));
                }
            }
            ["churn", rounds] => {
                self.churn(rounds.parse().unwrap());
                "0".to_owned()
            }
            _ => return None,
        })
    }

    /// Returns the largest allocation that succeeds, in steps of a grain.
    fn bisect(&self, family: &str, grain: u64) -> u64 {
        let (mut low, mut high) = (0, size("64G") / grain);
        while low + 1 < high {
            let middle = (low + high) / 2;
            match self.allocate(family, middle * grain) {
                Ok(new) => {
                    assert_eq!(self.free(&new), 0);
                    low = middle;
                }
                Err(2) => high = middle,
                Err(code) => panic!("{family} {} answers {code}", middle * grain),
            }
        }
        low * grain
    }

    /// Allocates and frees at random for so many rounds.
    fn churn(&mut self, rounds: u32) {
        let mut seed = u64::from(std::process::id()) | 1;
        for _ in 0..rounds {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let family = ["linear", "async", "vmm", "linear"][(seed >> 60) as usize % 4];
            let bytes = ((seed >> 33) % 16 + 1) * 2 * MIB;
            if seed >> 63 == 0 || self.held.is_empty() {
                match self.allocate(family, bytes) {
                    Ok(new) => self.held.push(new),
                    Err(2) => {}
                    Err(code) => panic!("{family} answers {code}"),
                }
            } else {
                let at = (seed >> 20) as usize % self.held.len();
                let any = self.held.swap_remove(at);
                assert_eq!(self.free(&any), 0);
            }
        }
    }
}
