//! The role `habits`: what of a driver's ways with memory and launches can be seen from outside.

use super::{Gpu, at, say};
use anyhow::{Result, ensure};
use serde_json::{Map, Value, json};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
/// Memory of the graph's node.
const NODE: u64 = 64 * MIB;
/// Launches after which a stream is taken for endless.
const MOST_LAUNCHES: u64 = 20_000;
/// A launch that takes as long has waited.
const WAITED: Duration = Duration::from_millis(100);
/// Length of the kernel that everything waits behind.
const LONG_US: u64 = 2_000_000;

impl Gpu {
    /// Tries all of them; one that the driver refuses is its error's text.
    pub(super) fn habits(&self) -> Result<()> {
        let mut found = Map::new();
        let mut put = |name: &str, value: Result<u64>| {
            let value = value.map_or_else(|error| json!(format!("{error:#}")), |number| json!(number));
            found.insert(name.to_owned(), value);
        };
        put("first_byte", self.takes(|| self.linear(1)));
        put("second_byte", self.takes(|| self.linear(1)));
        put("three_mib", self.takes(|| self.linear(3 * MIB)));
        put("granularity", self.granularity());
        put("pool_growth", self.takes(|| self.pooled(1)));
        match self.graph_memory() {
            Ok((node, launch)) => {
                put("graph_node", Ok(node));
                put("graph_launch", Ok(launch));
            }
            Err(error) => {
                let why = format!("{error:#}");
                put("graph_node", Err(anyhow::anyhow!(why.clone())));
                put("graph_launch", Err(anyhow::anyhow!(why)));
            }
        }
        put("queue", self.queue());
        say(&Value::Object(found))
    }

    /// By how much less memory is free after something was done.
    fn takes(&self, does: impl FnOnce() -> Result<()>) -> Result<u64> {
        let (before, _) = self.memory()?;
        does()?;
        Ok(before.saturating_sub(self.memory()?.0))
    }

    fn linear(&self, bytes: u64) -> Result<()> {
        let mut address = 0_u64;
        self.cuda.must("cuMemAlloc_v2", &[at(&mut address), bytes])
    }

    fn pooled(&self, bytes: u64) -> Result<()> {
        let mut address = 0_u64;
        self.cuda.must("cuMemAllocAsync", &[at(&mut address), bytes, 0])?;
        self.wait()
    }

    /// In which steps `cuMemCreate` hands out pinned memory of the device.
    fn granularity(&self) -> Result<u64> {
        let (mut properties, mut step) = ([0_u32; 8], 0_u64);
        let [kind, _, place, ..] = &mut properties;
        (*kind, *place) = (1, 1);
        self.cuda.must("cuMemGetAllocationGranularity", &[at(&mut step), at(&mut properties), 0])?;
        Ok(step)
    }

    /// What memory of a graph takes when the graph is instantiated, and what more when it is launched first.
    fn graph_memory(&self) -> Result<(u64, u64)> {
        let (mut stream, mut graph, mut exec, mut address) = (0_u64, 0_u64, 0_u64, 0_u64);
        self.cuda.must("cuStreamCreate", &[at(&mut stream), 1])?;
        self.cuda.must("cuStreamBeginCapture_v2", &[stream, 0])?;
        self.cuda.must("cuMemAllocAsync", &[at(&mut address), NODE, stream])?;
        self.cuda.must("cuMemFreeAsync", &[address, stream])?;
        self.cuda.must("cuStreamEndCapture", &[stream, at(&mut graph)])?;
        let node =
            self.takes(|| self.cuda.must("cuGraphInstantiateWithFlags", &[at(&mut exec), graph, 0]))?;
        let launch = self.takes(|| {
            self.cuda.must("cuGraphLaunch", &[exec, stream])?;
            self.wait()
        })?;
        Ok((node, launch))
    }

    /// Launches behind a long kernel until one waits: how many were outstanding.
    fn queue(&self) -> Result<u64> {
        let kernel = self.kernel()?;
        ensure!(kernel.launch(LONG_US, 0) == 0, "a launch failed");
        let mut count = 1;
        while count < MOST_LAUNCHES {
            let before = Instant::now();
            ensure!(kernel.launch(1, 0) == 0, "a launch failed");
            if before.elapsed() > WAITED {
                break;
            }
            count += 1;
        }
        self.wait()?;
        ensure!(count < MOST_LAUNCHES, "{MOST_LAUNCHES} launches waited for nothing");
        Ok(count)
    }
}
