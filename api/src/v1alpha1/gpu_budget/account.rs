//! `status.account` of a GpuBudget: the controller's bookkeeping, of bounded size however many claims there are.

use aliquot_model::MicroGpus;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The controller's bookkeeping.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Account {
    /// The first second that is counted.
    pub begun: i64,
    /// The last second that is counted.
    pub seen: i64,
    /// Claims that began before and are not listed are charged until then.
    #[serde(default)]
    #[schemars(with = "i64")]
    pub watermark: Option<i64>,
    /// Changes, each as <seconds since the one before>:<millionths of a GPU>.
    #[serde(default)]
    pub charged: String,
    /// Claims, each as <uid>:<since>:<claimed>:<held>:<released>:<millionths of a GPU>:<1 if it goes on>.
    #[serde(default)]
    pub claims: String,
    /// The nodes whose devices these claims were given, so that what other nodes say of them is not believed.
    #[serde(default)]
    pub sites: Sites,
    /// What an earlier release stored. It is read and dropped with the next write.
    // Written as null, because a merge patch keeps fields that it does not name.
    #[serde(default)]
    #[schemars(with = "Vec<EarlierUse>")]
    pub uses: Option<Vec<EarlierUse>>,
    /// What an earlier release stored. It is read and dropped with the next write.
    #[serde(default)]
    #[schemars(with = "String")]
    pub history: Option<String>,
}

impl Account {
    /// Returns the number of bytes of text in it.
    pub fn len(&self) -> usize {
        self.charged.len().saturating_add(self.claims.len()).saturating_add(self.sites.text.len())
    }

    /// Returns true if nothing is charged and no claim is known.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The nodes whose devices the claims of an account were given.
///
/// A controller that does not know this field leaves it as it is. Then it is of another moment than the account, and is
/// ignored.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub struct Sites {
    /// The last second that was counted when this was written.
    pub seen: i64,
    /// For each claim, in their order, the hashes of its nodes, or -.
    pub text: String,
}

/// A claim in the earlier form of an account.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct EarlierUse {
    /// UID of the claim.
    pub uid: String,
    /// When it was first seen.
    pub since: i64,
    /// The last time that the claim was seen allocated.
    pub claimed: i64,
    /// The last time that its node said that it held devices.
    #[serde(default)]
    #[schemars(with = "i64")]
    pub held: Option<i64>,
    /// When its node said that it released them.
    #[serde(default)]
    #[schemars(with = "i64")]
    pub released: Option<i64>,
    /// Its part of GPUs.
    #[serde(default)]
    #[schemars(with = "i64")]
    pub micro_gpus: Option<MicroGpus>,
    /// True if it went on.
    pub open: bool,
}
