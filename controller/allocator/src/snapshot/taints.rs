//! Taints of devices, and DeviceTaintRules.

use super::{Change, Device, Pool, Snapshot, Taint};
use k8s_openapi::api::resource::v1::DeviceToleration;
use serde::Deserialize;
use std::sync::Arc;

/// Returns true if a list of tolerations tolerates the taint, by the rules of `resourceclaim.ToleratesTaint`.
pub fn tolerated(taint: &Taint, tolerations: &[DeviceToleration]) -> bool {
    tolerations.iter().any(|toleration| {
        let effect = toleration.effect.as_deref().unwrap_or("");
        let key = toleration.key.as_deref().unwrap_or("");
        if (!effect.is_empty() && *effect != *taint.effect) || (!key.is_empty() && *key != *taint.key) {
            return false;
        }
        match toleration.operator.as_deref().unwrap_or("") {
            "" | "Equal" => toleration.value.as_deref().unwrap_or("") == &*taint.value,
            "Exists" => true,
            _ => false,
        }
    })
}

/// A DeviceTaintRule. All served versions share these fields.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaintRule {
    /// Name of the rule.
    pub name: Arc<str>,
    /// Driver that the rule selects; `None` for any.
    pub driver: Option<String>,
    /// Pool that the rule selects; `None` for any.
    pub pool: Option<String>,
    /// Device that the rule selects; `None` for any.
    pub device: Option<String>,
    /// The taint that the rule adds.
    pub taint: Taint,
}

/// The spec of a DeviceTaintRule.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
struct TaintRuleSpec {
    device_selector: Option<TaintSelector>,
    taint: TaintSpec,
}

#[derive(Debug, Clone, Deserialize)]
struct TaintSelector {
    driver: Option<String>,
    pool: Option<String>,
    device: Option<String>,
    /// Selectors of v1alpha3 that later versions dropped. A rule with one of them matches fewer devices than
    /// its other fields say, so it is left to components that know it.
    #[serde(rename = "deviceClassName")]
    class: Option<String>,
    selectors: Option<Vec<serde_json::Value>>,
}

#[derive(Debug, Clone, Deserialize)]
struct TaintSpec {
    key: String,
    #[serde(default)]
    value: String,
    effect: String,
}

impl TaintRule {
    /// Reads an object of any served version; `None` for a rule that selects by unknown fields, or that has
    /// no selector at all.
    pub fn read(name: &str, spec: &serde_json::Value) -> Option<Self> {
        let spec: TaintRuleSpec = serde_json::from_value(spec.clone()).ok()?;
        // A missing selector matches nothing; an empty one matches every device.
        let selector = spec.device_selector?;
        if selector.class.is_some() || selector.selectors.is_some_and(|s| !s.is_empty()) {
            return None;
        }
        Some(Self {
            name: name.into(),
            driver: selector.driver,
            pool: selector.pool,
            device: selector.device,
            taint: Taint {
                key: spec.taint.key.into(),
                value: spec.taint.value.into(),
                effect: spec.taint.effect.into(),
            },
        })
    }

    /// Returns true if the rule taints the device.
    pub fn applies(&self, driver: &str, pool: &str, device: &str) -> bool {
        self.driver.as_deref().is_none_or(|wanted| wanted == driver)
            && self.pool.as_deref().is_none_or(|wanted| wanted == pool)
            && self.device.as_deref().is_none_or(|wanted| wanted == device)
    }
}

impl Snapshot {
    /// Adds or replaces a rule; `None` removes it.
    pub fn apply_taint_rule(&mut self, name: &str, rule: Option<TaintRule>) -> Change {
        match rule {
            Some(rule) => {
                self.taint_rules.insert(name.into(), rule);
            }
            None => {
                self.taint_rules.remove(name);
            }
        }
        Change::Room
    }

    /// Removes a rule.
    pub fn delete_taint_rule(&mut self, name: &str) -> Change {
        self.taint_rules.remove(name);
        Change::Room
    }

    /// Replaces all rules.
    pub fn reset_taint_rules(&mut self, rules: Vec<TaintRule>) -> Change {
        self.taint_rules = rules.into_iter().map(|rule| (rule.name.clone(), rule)).collect();
        Change::Room
    }

    /// Returns the first taint that keeps the device from a request with these tolerations.
    pub fn repelling_taint<'a>(
        &'a self,
        pool: &Pool,
        device: &'a Device,
        tolerations: &[DeviceToleration],
    ) -> Option<&'a Taint> {
        let own = self.taints(device).iter();
        let ruled = self
            .taint_rules
            .values()
            .filter(|rule| rule.applies(self.driver(), self.name(pool.name), self.name(device.name)))
            .map(|rule| &rule.taint);
        own.chain(ruled).find(|taint| taint.repels() && !tolerated(taint, tolerations))
    }
}
