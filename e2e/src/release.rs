//! Releases of what was built here, and a registry that clusters pull them from.

use crate::cluster::{Cluster, SYSTEM};
use crate::command;
use anyhow::{Context, Result};
use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

const USER: &str = "puller";
const PASSWORD: &str = "of-the-test";
/// The registry's file of users: that password, as bcrypt with its least cost.
const USERS: &str = "puller:$2b$04$Mcw.yN/NL.QzvqL85voVmeFRBdOZTDKpDIdbwuEXgCOLSWpxjM3xG";
/// Where images lie in the registry.
const REPOSITORY: &str = "gpu/aliquot";
/// Secret of the chart's namespace with which images are pulled.
pub const PULL_SECRET: &str = "regcred";

/// A registry on this machine that gives images to nobody without a password; ended when dropped.
pub struct Registry {
    process: Child,
    address: SocketAddr,
    programs: PathBuf,
    dir: TempDir,
}

impl Drop for Registry {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Registry {
    /// Starts one, which is built first where it is not there (Go).
    ///
    /// # Errors
    /// If it cannot be built, or does not answer.
    pub async fn start(cluster: &Cluster) -> Result<Self> {
        let built = command::run(cluster.repo().join("e2e/cluster/build"), &["registry", "crane"])?;
        let programs = PathBuf::from(built.lines().last().context("no directory of programs")?);
        let dir = tempfile::tempdir()?;
        let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let users = dir.path().join("users");
        fs::write(&users, USERS)?;
        let settings = dir.path().join("registry.yml");
        let text = serde_json::json!({
            "version": 0.1,
            "log": {"level": "warn", "accesslog": {"disabled": true}},
            "storage": {"filesystem": {"rootdirectory": dir.path().join("images")}},
            "http": {"addr": address.to_string()},
            "auth": {"htpasswd": {"realm": "aliquot", "path": users}},
        });
        fs::write(&settings, text.to_string())?;
        let process = Command::new(programs.join("registry"))
            .arg("serve")
            .arg(&settings)
            .stdout(Stdio::null())
            .stderr(fs::File::create(dir.path().join("log"))?)
            .spawn()
            .context("cannot start the registry")?;
        let registry = Self { process, address, programs, dir };
        let connected = || async { Ok(std::net::TcpStream::connect(address).is_ok().then_some(())) };
        cluster.wait_at_most(Duration::from_secs(30), "the registry to listen", connected).await?;
        registry.crane(&["auth", "login", &address.to_string(), "-u", USER, "-p", PASSWORD])?;
        Ok(registry)
    }

    /// The repository that images are pulled from.
    pub fn repository(&self) -> String {
        format!("{}/{REPOSITORY}", self.address)
    }

    /// Pushes an OCI archive under a tag.
    ///
    /// # Errors
    /// What the registry says.
    pub fn push(&self, archive: &Path, tag: &str) -> Result<()> {
        let layout = tempfile::tempdir_in(self.dir.path())?;
        let layout = layout.path().to_str().context("a path that is not UTF-8")?;
        let archive = archive.to_str().context("a path that is not UTF-8")?;
        command::run("tar", &["-xf", archive, "-C", layout])?;
        self.crane(&["push", layout, &format!("{}:{tag}", self.repository())]).map(drop)
    }

    /// Gives the chart's namespace what it takes to pull.
    ///
    /// # Errors
    /// What the API says.
    pub fn admit(&self, cluster: &Cluster) -> Result<()> {
        // It may be there, with what helm or an earlier test has in it.
        drop(cluster.kubectl(&["create", "namespace", SYSTEM]));
        cluster.kubectl(&["-n", SYSTEM, "delete", "secret", PULL_SECRET, "--ignore-not-found"])?;
        let server = format!("--docker-server={}", self.address);
        let (user, password) = (format!("--docker-username={USER}"), format!("--docker-password={PASSWORD}"));
        let secret = ["-n", SYSTEM, "create", "secret", "docker-registry", PULL_SECRET];
        cluster.kubectl(&[&secret[..], &[&server, &user, &password]].concat()).map(drop)
    }

    fn crane(&self, args: &[&str]) -> Result<String> {
        // Whose password it is stays with the registry.
        let home = format!("DOCKER_CONFIG={}", self.dir.path().display());
        let crane = self.programs.join("crane");
        let crane = crane.to_str().context("a path that is not UTF-8")?;
        command::run("env", &[&[home.as_str(), crane], args].concat())
    }
}

/// What `make release` makes.
pub struct Release {
    /// Its version.
    pub version: String,
    /// Its chart, packed.
    pub chart: PathBuf,
    /// Its directory.
    pub dist: TempDir,
}

impl Release {
    /// A release of what was built here, or of the image that `ALIQUOT_IMAGE` names; its image is in the registry.
    ///
    /// # Errors
    /// If something is not built, or the registry does not take it.
    pub fn make(cluster: &Cluster, registry: &Registry, version: &str) -> Result<Self> {
        let dist = tempfile::tempdir()?;
        let text =
            |path: PathBuf| path.into_os_string().into_string().ok().context("a path that is not UTF-8");
        let given = std::env::var("ALIQUOT_IMAGE").ok();
        let image = match given {
            Some(archive) => archive,
            None => {
                let draft = text(dist.path().join("draft.tar"))?;
                let label = format!("--label=org.opencontainers.image.version={version}");
                let name = format!("{}:{version}", registry.repository());
                cluster.build_product(&name, &["--no-import", &label, "--output", &draft])?;
                draft
            }
        };
        let script = text(cluster.repo().join("tools/release"))?;
        command::run(
            "env",
            &[
                &format!("DIST={}", dist.path().display()),
                &format!("IMAGE={}", registry.repository()),
                &format!("HELM={}", cluster.setting("HELM")?),
                &format!("ALIQUOT_IMAGE_TOOL={}", text(cluster.program("aliquot-image"))?),
                "SOURCE_DATE_EPOCH=1",
                &script,
                "--image",
                &image,
                "--version",
                version,
            ],
        )?;
        registry.push(&dist.path().join(format!("aliquot-{version}.oci.tar")), version)?;
        let chart = dist.path().join(format!("aliquot-{version}.tgz"));
        Ok(Self { version: version.to_owned(), chart, dist })
    }
}
