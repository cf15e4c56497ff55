//! What the webhook counts.

use super::super::evaluators::Reason;
use super::super::{Config, serve};
use super::*;
use std::net::TcpListener;

#[test]
fn every_reason_to_leave_a_review_unchecked_is_counted_from_the_start() {
    let config = Config {
        driver: DRIVER.to_owned(),
        namespace: "n".to_owned(),
        secret: "s".to_owned(),
        configuration: "c".to_owned(),
        names: Vec::new(),
        substitution: true,
        elastic: true,
        governance: true,
        rules: Rules::default(),
        review_deadline: HOUR,
        failure: FailurePolicy::Ignore,
        budgets: false,
        certificate_life: HOUR,
        client_ca: None,
        interval: HOUR,
    };
    let (metrics, stop) = (Arc::new(Metrics::new()), CancellationToken::new());
    let health = Health::new(metrics.clone(), Pulse::default());
    let nowhere = kube::Config::new("http://127.0.0.1:9".parse().expect("an address"));
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let _ended = serve(listener, nowhere, config, metrics.clone(), health, stop.clone()).expect("threads");
    let text = metrics.text();
    for reason in Reason::ALL {
        let line = format!("aliquot_controller_unchecked_reviews_total{{reason=\"{}\"}} 0\n", reason.label());
        assert!(text.contains(&line), "{line}{text}");
    }
    stop.cancel();
}

#[test]
fn pods_that_meet_a_used_up_budget_are_counted_from_the_start() {
    let text = Metrics::new().text();
    for enforcement in ["Warn", "LowerPriority", "Refuse"] {
        let line = format!("aliquot_controller_budget_pods_total{{enforcement=\"{enforcement}\"}} 0\n");
        assert!(text.contains(&line), "{line}{text}");
    }
}
