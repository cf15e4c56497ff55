//! The strategy by which the controller decides.

use aliquot_allocator::schedule::{Placing, Strategy};
use aliquot_controller::args::StrategyArg;
use clap::ValueEnum;
use k8s_openapi::api::apps::v1::Deployment;
use kube::api::{Api, ListParams};
use kube::{Client, ResourceExt};

/// Labels of the controller's Deployment.
const LABELS: &str = "app.kubernetes.io/name=aliquot,app.kubernetes.io/component=controller";
/// The usual namespace of Aliquot: a user who may not list all Deployments may perhaps list those.
const USUAL: &str = "aliquot-system";

/// A strategy and its source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Known {
    /// The strategy.
    pub(super) strategy: Strategy,
    /// Where the strategy was found.
    pub(super) source: String,
}

/// Returns the strategy to decide by: the one that the command line names, otherwise the controller's,
/// otherwise the default.
pub(super) async fn find(client: &Client, driver: &str, wish: Option<StrategyArg>) -> Known {
    if let Some(wish) = wish {
        return Known { strategy: wish.into(), source: "--strategy".to_owned() };
    }
    let labels = ListParams::default().labels(LABELS);
    let mut found = Api::<Deployment>::all(client.clone()).list(&labels).await;
    if found.is_err() {
        found = Api::<Deployment>::namespaced(client.clone(), USUAL).list(&labels).await;
    }
    let assumed = |why: String| Known {
        strategy: Strategy::default(),
        source: format!("assumed, as {why}; --strategy names another"),
    };
    match found {
        Ok(list) => {
            let of_driver = |deployment: &&Deployment| serves(&arguments(deployment), driver);
            match list.iter().find(of_driver) {
                Some(deployment) => Known {
                    strategy: of_arguments(&arguments(deployment)),
                    source: format!(
                        "arguments of Deployment {}/{}",
                        deployment.namespace().unwrap_or_default(),
                        deployment.name_any()
                    ),
                },
                None => assumed(format!("there is no Deployment of its controller (labels {LABELS})")),
            }
        }
        Err(kube::Error::Api(status)) if status.code == 403 => {
            assumed(format!("you may not list deployments.apps in namespace {USUAL}"))
        }
        Err(error) => assumed(format!("its controller's Deployment cannot be read: {error}")),
    }
}

fn arguments(deployment: &Deployment) -> Vec<String> {
    let pod = deployment.spec.as_ref().and_then(|spec| spec.template.spec.as_ref());
    let containers = pod.into_iter().flat_map(|pod| &pod.containers);
    containers.flat_map(|c| c.command.iter().chain(&c.args).flatten().cloned()).collect()
}

/// Returns the value of a flag, written `--flag=value` or `--flag value`.
fn value<'a>(arguments: &'a [String], flag: &str) -> Option<&'a str> {
    let mut after: Option<&str> = None;
    // The last one counts if there are several.
    for word in arguments.iter().rev() {
        match word.strip_prefix(flag) {
            Some("") if after.is_some() => return after,
            Some(rest) if rest.starts_with('=') => return rest.strip_prefix('='),
            _ => after = Some(word),
        }
    }
    None
}

fn serves(arguments: &[String], driver: &str) -> bool {
    value(arguments, "--driver-name").unwrap_or(aliquot_model::names::DEFAULT_DRIVER) == driver
}

/// Returns the strategy in the controller's arguments.
fn of_arguments(arguments: &[String]) -> Strategy {
    let read = |flag| {
        let value = value(arguments, flag)?;
        StrategyArg::from_str(value, false).ok().map(Strategy::from)
    };
    let level = |flag| read(flag).map(Strategy::node);
    read("--strategy").unwrap_or_default().unless(level("--node-strategy"), level("--gpu-strategy"))
}

/// Returns both levels of a strategy as text.
pub(super) fn words(strategy: Strategy) -> String {
    let way = |placing| match placing {
        Placing::BinPack => "bin-pack",
        Placing::Spread => "spread",
    };
    format!("nodes {}, GPUs {}", way(strategy.node()), way(strategy.gpu()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("", Strategy::BinPack)]
    #[case("--strategy=spread", Strategy::Spread)]
    #[case("--strategy spread --gpu-strategy bin-pack", Strategy::SpreadNodes)]
    #[case("--node-strategy=bin-pack --gpu-strategy=spread", Strategy::SpreadGpus)]
    #[case("--strategy=of-a-later-release", Strategy::BinPack)]
    fn the_controllers_arguments_say_its_strategy(#[case] text: &str, #[case] strategy: Strategy) {
        let arguments: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
        assert_eq!(of_arguments(&arguments), strategy);
    }

    #[test]
    fn the_controller_of_another_driver_is_not_asked() {
        let arguments = vec!["--driver-name".to_owned(), "other.example.com".to_owned()];
        assert!(serves(&arguments, "other.example.com") && !serves(&arguments, "gpu.aliquot.dev"));
        assert!(serves(&[], "gpu.aliquot.dev"));
    }
}
