//! What published devices take of etcd, asked through its JSON gateway.

use crate::fleet::Fleet;
use crate::report::Report;
use aliquot_e2e::cluster::Cluster;
use aliquot_e2e::figure::Figure;
use anyhow::{Context, Result};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::{Api, ListParams};
use kube::{Client, Config};
use serde_json::{Value, json};

/// Where the API server keeps ResourceSlices.
const PREFIX: &str = "/registry/resourceslices/";
/// The first key that is not below it.
const END: &str = "/registry/resourceslices0";
/// Keys of an answer.
const PAGE: usize = 100;

/// Adds bytes per device and per node, and the size of the database.
pub(crate) async fn measure(cluster: &Cluster, fleet: &Fleet, report: &mut Report) -> Result<()> {
    let client = Client::try_from(Config::new(cluster.setting("ETCD")?.parse()?))?;
    let (bytes, slices) = stored(&client).await?;
    let devices = devices(cluster).await?;
    let status = ask(&client, "/v3/maintenance/status", &json!({})).await?;
    let in_use =
        status.get("dbSizeInUse").and_then(Value::as_str).context("etcd does not say how large it is")?;
    let in_use: f64 = in_use.parse()?;
    #[expect(clippy::cast_precision_loss, reason = "far fewer than 2^52")]
    let (bytes, slices, devices, nodes) = (bytes as f64, slices as f64, devices as f64, fleet.size() as f64);
    println!(
        "etcd: {bytes} bytes in {slices} ResourceSlices with {devices} devices of {nodes} nodes; database in use: {in_use}"
    );
    let command =
        "throughput, keys and values below /registry/resourceslices/ after the first publication".to_owned();
    let figure = |name: &str, value: f64, unit: &str, baseline: f64| Figure {
        name: name.to_owned(),
        value,
        unit: unit.to_owned(),
        baseline,
        ratio: value / baseline,
        command: command.clone(),
        assumed: Vec::new(),
    };
    report.add(figure(
        "allocator.etcd.bytes_per_device",
        bytes / devices,
        "bytes; baseline: a slice",
        bytes / slices,
    ));
    report.add(figure(
        "allocator.etcd.bytes_per_node",
        bytes / nodes,
        "bytes, node of 8 H100; baseline: etcd's quota of 2 GiB",
        2.0 * 1024.0 * 1024.0 * 1024.0,
    ));
    Ok(())
}

/// Bytes of keys and values, and how many there are.
async fn stored(client: &Client) -> Result<(usize, usize)> {
    let (mut bytes, mut slices) = (0, 0);
    let mut from = PREFIX.as_bytes().to_vec();
    loop {
        let page = json!({"key": STANDARD.encode(&from), "range_end": STANDARD.encode(END), "limit": PAGE});
        let answer = ask(client, "/v3/kv/range", &page).await?;
        let pairs = answer.get("kvs").and_then(Value::as_array).cloned().unwrap_or_default();
        for pair in &pairs {
            let part =
                |name: &str| STANDARD.decode(pair.get(name).and_then(Value::as_str).unwrap_or_default());
            let (key, value) = (part("key")?, part("value")?);
            bytes += key.len() + value.len();
            slices += 1;
            from = key;
            from.push(0);
        }
        if pairs.len() < PAGE {
            return Ok((bytes, slices));
        }
    }
}

async fn ask(client: &Client, path: &str, body: &Value) -> Result<Value> {
    let request = http::Request::post(path).header("content-type", "application/json");
    Ok(client.request(request.body(serde_json::to_vec(body)?)?).await?)
}

async fn devices(cluster: &Cluster) -> Result<usize> {
    let api = Api::<ResourceSlice>::all(cluster.client.clone());
    let mut page = ListParams::default().limit(200);
    let mut devices = 0;
    loop {
        let list = api.list(&page).await?;
        devices += list.items.iter().map(|slice| slice.spec.devices.iter().flatten().count()).sum::<usize>();
        match list.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => page = ListParams::default().limit(200).continue_token(&token),
            None => return Ok(devices),
        }
    }
}
