//! Nodes without machines, and what the node agent would publish for them.

use aliquot_e2e::cluster::Cluster;
use aliquot_e2e::command;
use aliquot_kubelet_plugin::resourceslice::{self, Owner};
use aliquot_model::layout::{AllocatorMode, GpuState, Options, ServerFeatures, publish};
use aliquot_model::{DeviceName, GpuInfo, Placement, names};
use anyhow::{Context, Result};
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use kube::{Client, ResourceExt};

/// A H100 as tests know it.
use aliquot_allocator::fixtures;

/// GPUs of a node.
pub(crate) const GPUS: u32 = 8;
/// Label of nodes without machines, as `e2e/cluster/fake-nodes` sets it.
pub(crate) const FAKE: &str = "aliquot.dev/fake-node";
/// Objects that are written at a time.
const AT_A_TIME: usize = 16;

/// The nodes.
pub(crate) struct Fleet {
    client: Client,
    server: ServerFeatures,
    /// Name and UID.
    nodes: Vec<(String, String)>,
    generation: i64,
}

impl Fleet {
    /// Makes the nodes; those that are there stay.
    pub(crate) async fn create(cluster: &Cluster, count: usize) -> Result<Self> {
        let script = cluster.repo().join("e2e/cluster/fake-nodes");
        command::run(script, &["--count", &count.to_string()])?;
        let client = cluster.client.clone();
        let fake = ListParams::default().labels(FAKE);
        let nodes = Api::<Node>::all(client.clone()).list(&fake).await?;
        let nodes = nodes.into_iter().map(|node| (node.name_any(), node.uid().unwrap_or_default())).collect();
        Ok(Self { client, server: ServerFeatures::all_of_minor(cluster.minor()?), nodes, generation: 0 })
    }

    /// How many nodes there are.
    pub(crate) const fn size(&self) -> usize {
        self.nodes.len()
    }

    /// Publishes all GPUs, in the place of what was published before.
    pub(crate) async fn publish(&mut self, mode: AllocatorMode) -> Result<()> {
        let api = Api::<ResourceSlice>::all(self.client.clone());
        let ours = ListParams::default().fields(&format!("spec.driver={}", names::DEFAULT_DRIVER));
        api.delete_collection(&DeleteParams::default(), &ours).await?;
        self.generation += 1;
        let objects = self.nodes.iter().flat_map(|(node, uid)| self.slices(node, uid, mode));
        futures::stream::iter(objects)
            .map(|slice| {
                let api = api.clone();
                async move { api.create(&PostParams::default(), &slice).await.map(drop) }
            })
            .buffer_unordered(AT_A_TIME)
            .try_collect::<Vec<()>>()
            .await
            .context("cannot publish")?;
        Ok(())
    }

    fn slices(&self, node: &str, uid: &str, mode: AllocatorMode) -> Vec<ResourceSlice> {
        let gpus: Vec<GpuState> = (0..GPUS)
            .map(|minor| GpuState {
                info: fixtures::h100(node, minor),
                live: Vec::new(),
                held: Vec::new(),
                standing: Vec::new(),
                taints: Vec::new(),
            })
            .collect();
        let options = Options {
            driver: names::DEFAULT_DRIVER.to_owned(),
            mode,
            slots: 10,
            mps: [].into(),
            mig_shares: false,
            passthrough: Default::default(),
        };
        let layout = publish(&gpus, self.server, &options);
        let owner = Owner {
            driver: names::DEFAULT_DRIVER.to_owned(),
            pool: names::pool_name(names::DEFAULT_DRIVER, node),
            node: node.to_owned(),
            node_uid: uid.to_owned(),
            hand_over_until: None,
        };
        resourceslice::objects(&layout, &owner, self.generation)
    }

    /// A device for each of so many claims, none overlapping another: what a decision would come to.
    pub(crate) fn places(&self, claims: usize) -> Result<Vec<(String, String)>> {
        let board = fixtures::h100("any", 0);
        let mut gpus: Vec<(usize, u32, Vec<Placement>)> = (0..self.nodes.len())
            .flat_map(|node| (0..GPUS).map(move |minor| (node, minor, Vec::new())))
            .collect();
        (0..claims)
            .map(|claim| {
                let profile = crate::load::profile(claim);
                let found = gpus.iter_mut().find_map(|(node, minor, taken)| {
                    let (device, placement) = free(&board, profile, *minor, taken)?;
                    taken.push(placement);
                    Some((*node, device))
                });
                let (node, device) =
                    found.with_context(|| format!("no room for claim {claim} ({profile})"))?;
                let (node, _) = self.nodes.get(node).context("no such node")?;
                Ok((node.clone(), device))
            })
            .collect()
    }
}

fn free(board: &GpuInfo, profile: &str, minor: u32, taken: &[Placement]) -> Option<(String, Placement)> {
    let profile = board.profiles().iter().find(|known| *known.name.as_str() == *profile)?;
    let placement = profile.placements.iter().find(|at| taken.iter().all(|other| !at.overlaps(*other)))?;
    let device = DeviceName::mig(minor, &profile.name, profile.id, *placement);
    Some((device.to_string(), *placement))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::PROFILES;

    #[test]
    fn the_board_has_every_profile_of_the_mix() {
        let board = fixtures::h100("any", 0);
        for profile in PROFILES {
            assert!(free(&board, profile, 0, &[]).is_some(), "{profile}");
        }
    }

    #[test]
    fn no_device_is_given_where_another_lies() {
        let board = fixtures::h100("any", 0);
        assert!(free(&board, "7g.80gb", 0, &[Placement::new(3, 1)]).is_none());
        let (device, placement) = free(&board, "3g.40gb", 2, &[Placement::new(3, 1)]).expect("room above");
        assert_eq!((device.as_str(), placement), ("gpu-2-mig-3g40gb-9-4", Placement::new(4, 4)));
    }
}
