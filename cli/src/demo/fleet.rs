//! The demo's nodes.

use aliquot_sim_node::{GpuSpec, NodeSpec};
use anyhow::{Context, Result, bail};
use serde::Deserialize;
use std::path::Path;

/// The nodes to simulate.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Fleet {
    pub(crate) nodes: Vec<FleetNode>,
}

/// A node.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FleetNode {
    /// The node's name in Kubernetes.
    pub(crate) name: String,
    pub(crate) gpus: Vec<FleetGpus>,
}

/// A number of equal GPUs.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FleetGpus {
    /// The board, for example `H100-80` or `A30`.
    pub(crate) board: String,
    #[serde(default = "one")]
    pub(crate) count: u32,
    /// True if MIG mode is enabled at start.
    #[serde(default)]
    pub(crate) mig: bool,
}

const fn one() -> u32 {
    1
}

/// The most GPUs of a node, as on the largest HGX boards.
const MAX_GPUS: u32 = 16;

impl Fleet {
    /// Returns the built-in fleet: a node with eight H100, one with four A100 of which two are in MIG mode,
    /// and one with two boards of other kinds.
    pub(crate) fn built_in() -> Self {
        let gpus = |board: &str, count, mig| FleetGpus { board: board.to_owned(), count, mig };
        Self {
            nodes: vec![
                FleetNode { name: "node-h100".into(), gpus: vec![gpus("H100-80", 8, false)] },
                FleetNode {
                    name: "node-a100".into(),
                    gpus: vec![gpus("A100-80", 2, false), gpus("A100-80", 2, true)],
                },
                FleetNode {
                    name: "node-mixed".into(),
                    gpus: vec![gpus("L40S", 1, false), gpus("A100-40", 1, true)],
                },
            ],
        }
    }

    /// Reads and checks a fleet file.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let fleet: Self =
            serde_saphyr::from_str(&text).map_err(|error| anyhow::anyhow!("{}: {error}", path.display()))?;
        fleet.check().with_context(|| path.display().to_string())?;
        Ok(fleet)
    }

    fn check(&self) -> Result<()> {
        if self.nodes.is_empty() {
            bail!("a fleet needs at least one node");
        }
        for (index, node) in self.nodes.iter().enumerate() {
            let label = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '-' | '.');
            if node.name.is_empty() || node.name.len() > 63 || !node.name.chars().all(label) {
                bail!("node {:?}: a name is 1 to 63 of a-z, 0-9, '-' and '.'", node.name);
            }
            if self.nodes.iter().take(index).any(|other| other.name == node.name) {
                bail!("node {:?} is there twice", node.name);
            }
            let count: u32 = node.gpus.iter().map(|g| g.count).fold(0, u32::saturating_add);
            if !(1..=MAX_GPUS).contains(&count) {
                bail!("node {:?} has {count} GPUs; 1 to {MAX_GPUS} are possible", node.name);
            }
            node.spec().resolve().with_context(|| format!("node {:?}", node.name))?;
        }
        Ok(())
    }
}

impl FleetNode {
    /// Returns the node as the simulator takes it; UUIDs are derived from the node's name.
    pub(crate) fn spec(&self) -> NodeSpec {
        let mut spec = NodeSpec::new(Vec::<String>::new()).with_seed(&self.name);
        for gpus in &self.gpus {
            for _ in 0..gpus.count.min(MAX_GPUS) {
                let gpu = GpuSpec::new(&gpus.board);
                spec.gpus.push(if gpus.mig { gpu.with_mig() } else { gpu });
            }
        }
        spec
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    fn read(text: &str) -> Result<Fleet> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("fleet.yaml");
        std::fs::write(&path, text).unwrap();
        Fleet::read(&path)
    }

    #[test]
    fn the_built_in_fleet_is_legal() {
        Fleet::built_in().check().unwrap();
    }

    #[test]
    fn a_fleet_file_names_boards_counts_and_mode() {
        let fleet =
            read("nodes:\n- name: a\n  gpus:\n  - {board: A30, count: 2, mig: true}\n  - board: T4\n")
                .unwrap();
        let spec = fleet.nodes[0].spec();
        assert_eq!(spec.gpus.len(), 3);
        assert!(spec.gpus[1].mig && !spec.gpus[2].mig);
    }

    #[rstest]
    #[case("nodes: []", "at least one node")]
    #[case("nodes:\n- name: A\n  gpus: [{board: T4}]\n", "a name is")]
    #[case("nodes:\n- name: a\n  gpus: [{board: H101}]\n", "H101")]
    #[case("nodes:\n- name: a\n  gpus: [{board: T4, mig: true}]\n", "no MIG")]
    #[case("nodes:\n- name: a\n  gpus: [{board: T4, count: 99}]\n", "99 GPUs")]
    #[case("nodes:\n- name: a\n  gpu: []\n", "gpu")]
    #[case("nodes: [\n", "fleet.yaml")]
    fn bad_fleets_are_explained(#[case] text: &str, #[case] want: &str) {
        let error = format!("{:#}", read(text).unwrap_err());
        assert!(error.contains(want), "{error}");
    }
}
