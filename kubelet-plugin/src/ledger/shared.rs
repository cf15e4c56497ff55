//! Handles partitions that several claims have shares of. Pure: it does no I/O.

use super::{Device, Held, Ledger};
use crate::claim::Consumed;
use aliquot_model::MigUuid;

impl Device {
    /// Returns the UUID under which programs see the hardware: that of the partition, which is known once it
    /// exists, or that of the GPU.
    pub fn uuid(&self) -> Option<&str> {
        match &self.partition {
            Some(partition) => partition.uuid.as_ref().map(MigUuid::as_str),
            None => Some(self.gpu.as_str()),
        }
    }

    /// Returns the hardware that the device is a part of, for messages.
    pub fn shared_hardware(&self) -> String {
        match &self.partition {
            Some(partition) => {
                format!("{} at {} on GPU {}", partition.profile, partition.placement, self.gpu)
            }
            None => format!("GPU {}", self.gpu),
        }
    }

    /// Returns the capacity of a shareable device that no other claim may have: the allocated capacity, or
    /// the granted capacity where it is larger.
    pub fn reserved(&self) -> Option<Consumed> {
        let mut reserved = self.consumed?;
        if let Some(granted) = self.share.as_ref().and_then(|share| share.granted) {
            reserved.memory_bytes = reserved.memory_bytes.max(granted.memory_bytes);
            reserved.cores_percent = reserved.cores_percent.max(granted.cores_percent);
        }
        Some(reserved)
    }

    /// Returns true if two devices are shares of the same GPU, or of the same partition.
    pub fn shares_with(&self, other: &Self) -> bool {
        self.share.is_some() && other.share.is_some() && self.gpu == other.gpu && self.held == other.held
    }
}

impl Ledger {
    /// Returns the shares that other claims have of the partition of a device.
    pub fn sharers<'a>(&'a self, uid: &'a str, device: &'a Device) -> impl Iterator<Item = &'a Device> + 'a {
        let is_shared = matches!(device.held, Some(Held::SharedPartition { .. }));
        let others = self.others(uid, &device.gpu).map(|(_, other)| other);
        others.filter(move |other| is_shared && other.held == device.held)
    }

    /// Returns true if a claim has shares of a partition. Such shares are only accounted for while their
    /// devices are published.
    pub fn has_shared_partitions(&self) -> bool {
        let mut held = self.claims.values().flat_map(|record| &record.devices);
        held.any(|device| matches!(device.held, Some(Held::SharedPartition { .. })))
    }
}
