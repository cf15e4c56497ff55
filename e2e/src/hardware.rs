//! The simulated GPUs under the real Kubernetes, as the node's administrator sees them.

use crate::cluster::{Cluster, SIM};
use aliquot_model::names::DEFAULT_DRIVER;
use aliquot_sim_node::{Fault, GpuSpec, Node, NodeSpec};
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Index of the board in MIG mode whose mode cannot change without a reset.
pub const A100_MIG: usize = 3;

impl Cluster {
    /// Makes the simulated node on this host, as after a first boot: two H100, an A100 without and one
    /// with MIG mode, an L40S, which has none.
    ///
    /// # Errors
    /// If the stand-in libraries are not built or the directory cannot be written.
    pub fn create_hardware(&self) -> Result<()> {
        self.create_hardware_with(&[])
    }

    /// The same with more boards.
    ///
    /// # Errors
    /// If the stand-in libraries are not built or the directory cannot be written.
    pub fn create_hardware_with(&self, more: &[GpuSpec]) -> Result<()> {
        if Path::new(SIM).exists() {
            std::fs::remove_dir_all(SIM).context("cannot remove the old simulated node")?;
        }
        let mut spec = NodeSpec::new(Vec::<String>::new()).with_seed("e2e");
        spec.gpus = vec![
            GpuSpec::new("H100-80"),
            GpuSpec::new("H100-80"),
            GpuSpec::new("A100-80"),
            GpuSpec::new("A100-80").with_mig(),
            GpuSpec::new("L40S"),
        ];
        spec.gpus.extend_from_slice(more);
        spec.nvml_library = Some(self.build.join("libnvidia_ml.so"));
        spec.cuda_library = Some(self.build.join("libcuda.so"));
        spec.nvidia_smi = Some(self.build.join("aliquot-sim"));
        aliquot_sim_node::create(Path::new(SIM), &spec).context("cannot create the simulated node")?;
        Ok(())
    }

    /// The simulated node.
    ///
    /// # Errors
    /// If it was not created.
    pub fn hardware(&self) -> Result<Node> {
        Ok(Node::open(Path::new(SIM))?)
    }

    /// GPU instances that exist, as `gpu-<minor>/<id>`.
    ///
    /// # Errors
    /// If the node cannot be read.
    pub fn gpu_instances(&self) -> Result<Vec<String>> {
        let node = self.hardware()?;
        let mut found = Vec::new();
        for (index, gpu) in node.gpus().iter().enumerate().filter(|(_, gpu)| gpu.board.has_mig()) {
            found.extend(node.gis(index)?.iter().map(|gi| format!("gpu-{}/{}", gpu.minor, gi.id)));
        }
        Ok(found)
    }

    /// Makes every call of an NVML or CUDA function wait; gives the rule's id.
    ///
    /// # Errors
    /// If the node cannot be written.
    pub fn delay_calls(&self, function: &str, delay: Duration) -> Result<u64> {
        Ok(self.hardware()?.add_fault(&Fault::delay(function, delay))?)
    }

    /// How often a function was called since its fault rule was made.
    ///
    /// # Errors
    /// If there is no such rule.
    pub fn calls(&self, rule: u64) -> Result<u64> {
        let rules = self.hardware()?.faults()?;
        Ok(rules.iter().find(|r| r.id == rule).context("no such rule")?.calls)
    }

    /// Removes all faults.
    ///
    /// # Errors
    /// If the node cannot be written.
    pub fn clear_faults(&self) -> Result<()> {
        Ok(self.hardware()?.remove_faults(None)?)
    }

    /// The node agent's directory.
    ///
    /// # Errors
    /// If `cluster.env` does not say.
    pub fn agent_dir(&self) -> Result<PathBuf> {
        Ok(Path::new(self.setting("PLUGIN_DIR")?).join(DEFAULT_DRIVER))
    }

    /// Our CDI specs: file name and content.
    ///
    /// # Errors
    /// If the directory cannot be read.
    pub fn cdi_specs(&self) -> Result<Vec<(String, String)>> {
        let dir = Path::new(self.setting("CDI_DIR")?);
        let mut specs = Vec::new();
        for name in list(dir)? {
            if name.contains("aliquot") {
                // One may be removed between the two looks.
                let Ok(text) = std::fs::read_to_string(dir.join(&name)) else { continue };
                specs.push((name, text));
            }
        }
        specs.sort();
        Ok(specs)
    }

    /// Claims in the node agent's checkpoint, by uid.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn ledger(&self) -> Result<Vec<String>> {
        let path = self.agent_dir()?.join("checkpoint.json");
        let text = match std::fs::read_to_string(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            other => other?,
        };
        // The first line is the header.
        let (_, body) = text.split_once('\n').context("the checkpoint has no header")?;
        let ledger: serde_json::Value = serde_json::from_str(body).context("the checkpoint is no JSON")?;
        let claims = ledger.pointer("/claims").context("the checkpoint has no claims")?;
        Ok(match claims {
            serde_json::Value::Object(claims) => claims.keys().cloned().collect(),
            serde_json::Value::Array(claims) => claims.iter().map(ToString::to_string).collect(),
            other => anyhow::bail!("claims are {other}"),
        })
    }

    /// What is left on the node: GPU instances, CDI files, ledger entries, quota directories, device metadata.
    ///
    /// # Errors
    /// If something cannot be read.
    pub fn node_leftovers(&self) -> Result<Vec<String>> {
        let mut found = Vec::new();
        found.extend(self.gpu_instances()?.into_iter().map(|i| format!("GPU instance {i}")));
        found.extend(self.cdi_specs()?.into_iter().map(|(name, _)| format!("CDI file {name}")));
        let shares = list(&self.agent_dir()?.join("shares"))?;
        found.extend(shares.into_iter().map(|d| format!("quota directory {d}")));
        // Where no claim ever had any, there is no directory.
        let metadata = self.agent_dir()?.join("dra-device-metadata");
        let metadata = if metadata.exists() { list(&metadata)? } else { Vec::new() };
        found.extend(metadata.into_iter().map(|uid| format!("device metadata of claim {uid}")));
        found.extend(self.ledger()?.into_iter().map(|uid| format!("checkpoint entry {uid}")));
        Ok(found)
    }
}

/// Names in a directory; an absent one is empty.
pub(crate) fn list(dir: &Path) -> Result<Vec<String>> {
    match std::fs::read_dir(dir) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error).with_context(|| format!("cannot list {}", dir.display())),
        Ok(entries) => entries.map(|e| Ok(e?.file_name().to_string_lossy().into_owned())).collect(),
    }
}
