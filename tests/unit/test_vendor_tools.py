"""Parsing recorded outputs of npu-smi, nvidia-smi, hccn_tool and CANN's files."""

import stat
from pathlib import Path

import pytest

from tasks.preflight.vendor_tools import ascend, nvidia, states
from tasks.preflight.vendor_tools.states import MIB, DevicesFound

DATA = Path(__file__).parents[1] / "data" / "vendor_tools"


def recorded(name: str) -> str:
    return (DATA / name).read_text()


def shown(found: DevicesFound) -> list[tuple[object, ...]]:
    """Label, number, health and memory in MiB of each device."""
    rows: list[tuple[object, ...]] = []
    for each in found.devices:
        sizes = (each.used_bytes, each.total_bytes)
        mebibytes = (None if size is None else size // MIB for size in sizes)
        rows.append((each.label, each.number, each.health, *mebibytes))
    return rows


@pytest.mark.parametrize(
    ("name", "driver", "expected"),
    [
        (
            "24.1.0_910b3",
            "24.1.0",
            [("NPU 0", "0", "OK", 65521, 65536), ("NPU 2", "2", "OK", 3401, 65536)],
        ),
        (
            "25.2.0_a3",
            "25.2.0",
            [
                ("NPU 0 device 0", "0", "OK", 61609, 65536),
                ("NPU 0 device 1", "1", "OK", 61625, 65536),
                ("NPU 1", "2", "OK", 61616, 65536),
            ],
        ),
        (  # both chips of a card are number 0
            "24.1.rc2_310p3",
            "24.1.rc2",
            [
                ("NPU 1 device 0", "0", "OK", 1397, 44280),
                ("NPU 1 device 1", "1", "OK", 1520, 43693),
            ],
        ),
        (
            "23.0.rc3_310p3",
            "23.0.rc3",
            [("NPU 0", "0", "OK", 3841, 21527), ("NPU 64", "1", "OK", 1764, 21527)],
        ),
        ("23.0.rc2_910a", "23.0.rc2", [("NPU 3", "3", "OK", 0, 32768)]),  # HBM, not the host's part
        (
            "warning_a3",
            None,
            [
                ("NPU 0 device 0", "0", "OK", 3101, 65536),
                ("NPU 0 device 1", "1", "Warning", 2887, 65536),
            ],
        ),
    ],
)
def test_npu_smi_of_several_models_and_drivers(
    name: str, driver: str | None, expected: list[tuple[object, ...]]
) -> None:
    found = ascend.parse_devices(recorded(f"npu_smi_{name}.txt"))
    assert (found.driver, shown(found), found.unread) == (driver, expected, ())


def test_processes_belong_to_their_chip() -> None:
    found = ascend.parse_devices(recorded("npu_smi_25.2.0_a3.txt")).devices
    assert [[(each.pid, each.num_bytes) for each in device.processes] for device in found] == [
        [(934451, 141 * MIB), (929673, 141 * MIB)],
        [(929405, 58780 * MIB)],
        [(929673, 58540 * MIB)],
    ]
    [[process], []] = [
        device.processes
        for device in ascend.parse_devices(recorded("npu_smi_26.0.rc2_a3.txt")).devices
    ]
    assert (process.pid, process.name, process.num_bytes) == (632268, "python3.1", 197 * MIB)


def test_values_that_npu_smi_does_not_print_are_not_guessed() -> None:
    found = ascend.parse_devices(recorded("npu_smi_without_driver.txt"))
    assert found.devices == ()
    assert found.unread[-1] == "dcmi module initialize failed. ret is -8005"
    assert ascend.parse_devices("").unread == ("npu-smi info shows no device",)
    rows = "| 0     910B3               | NA            | - | \n| 0   | NA  | -  - / -   NA |\n"
    [device] = ascend.parse_devices(rows).devices
    assert (device.health, device.used_bytes, device.total_bytes) == (None, None, None)
    text = "[WARNING]The driver package may not be completely installed."
    assert ascend.parse_devices(recorded("npu_smi_24.1.0_910b3.txt") + text).unread == (text,)


def test_nvidia_smi_with_memory_errors_and_processes() -> None:
    found = nvidia.parse(recorded("nvidia_smi_h100_550.csv"), recorded("nvidia_smi_l40s_apps.csv"))
    warning = "Warning: 3 uncorrected memory errors since the driver started"
    assert found.driver == "550.90.07"
    assert shown(found) == [("GPU 0", "0", "OK", 412, 81559), ("GPU 1", "1", warning, 412, 81559)]
    assert [(each.pid, each.num_bytes) for each in found.devices[1].processes] == [
        (44378, 1836 * MIB),
        (44966, 974 * MIB),
        (524, None),
    ]
    assert [each.number for each in found.named("GPU-a4")] == ["1"]
    assert [each.number for each in found.named("0")] == ["0"]


def test_nvidia_smi_with_mig_old_drivers_and_lost_gpus() -> None:
    assert shown(nvidia.parse(recorded("nvidia_smi_mig.csv"))) == [
        ("GPU 0 (MIG)", "0", "OK", None, None),
        ("GPU 1", "1", "OK", 4, 81559),
    ]
    assert shown(nvidia.parse(recorded("nvidia_smi_p100_418.csv"))) == [
        ("GPU 0", "0", "OK", 1628, 16280)
    ]
    lost = nvidia.parse(recorded("nvidia_smi_lost.csv"))
    assert [each.health for each in lost.devices] == ["Critical: the driver reads errors from it"]
    assert "GPU is lost" in lost.unread[0]
    assert nvidia.parse("").unread == ("nvidia-smi shows no GPU",)


def test_the_port_of_an_npu() -> None:
    texts = {
        "link": "link status: UP\n",
        "net_health": "net health status: Receive timeout\n",
        "tls": recorded("hccn_tls_24.txt"),
        "ip": "ipaddr:29.1.112.213\nnetmask:255.255.0.0\n",
    }
    port = ascend.parse_link("1", texts)
    assert (port.link, port.health, port.tls) == ("UP", "Receive timeout", "1")
    assert port.address == "29.1.112.213"
    assert ascend.parse_link("0", {"tls": recorded("hccn_tls_25.txt")}).tls == "0"
    silent = ascend.parse_link("0", {"link": "hccn tool is busy, please try again"})
    assert (silent.link, silent.health, silent.tls, silent.address) == (None, None, None, None)


def test_versions_of_cann_and_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ascend.platform, "machine", lambda: "aarch64")
    assert ascend.cann_version({}, tmp_path) is None
    usual, named = (tmp_path / name / "aarch64-linux" for name in ("ascend-toolkit/latest", "mine"))
    for folder, version in ((usual, "8.3.RC2"), (named, "9.1.0")):
        folder.mkdir(parents=True)
        text = recorded("cann_8.3.rc2.info").replace("8.3.RC2", version)
        (folder / "ascend_toolkit_install.info").write_text(text)
    assert ascend.cann_version({}, tmp_path) == "8.3.RC2"
    assert ascend.cann_version({"ASCEND_TOOLKIT_HOME": str(tmp_path / "mine")}, tmp_path) == "9.1.0"
    (tmp_path / "driver").mkdir()
    (tmp_path / "driver" / "version.info").write_text("Version=25.5.2\nascendhal_version=7.35.23\n")
    assert ascend.driver_version(tmp_path) == "25.5.2"


def _tool(folder: Path, name: str, script: str) -> None:
    program = folder / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


def test_tools_are_called_and_a_missing_or_failing_one_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(ascend, "SMI_FOLDERS", ())
    monkeypatch.setattr(ascend, "HCCN_FOLDERS", ())
    assert ascend.devices().unread[0] == "npu-smi is not installed here"
    assert ascend.links(["0"]) == ([], "hccn_tool is not installed here")
    assert nvidia.devices().unread == ("nvidia-smi is not installed here",)

    _tool(tmp_path, "npu-smi", f"cat {DATA}/npu_smi_26.0.rc2_a3.txt")
    assert len(ascend.devices().devices) == 2
    _tool(tmp_path, "npu-smi", f"cat {DATA}/npu_smi_without_driver.txt; exit 255")
    assert "exited with status 255: dcmi module" in ascend.devices().unread[0]

    answers = '-link) echo "link status: UP";; -tls) echo "tls switch[0](0:disable)";; *) exit 1'
    _tool(tmp_path, "hccn_tool", f'case "$3" in {answers};; esac')
    [port, other], reason = ascend.links(["4", "5"])
    assert (reason, port.label, other.label) == ("", "NPU 4", "NPU 5")
    assert (port.link, port.tls, port.health) == ("UP", "0", None)

    old = f"*mig.mode*) echo is not a valid field; exit 2;; *compute*) ;; *) cat {DATA}"
    _tool(tmp_path, "nvidia-smi", f'case "$1" in {old}/nvidia_smi_p100_418.csv;; esac')
    found = nvidia.devices()
    assert (len(found.devices), found.unread) == (1, ())

    monkeypatch.setattr(states, "TOOL_SECONDS", 0.1)
    _tool(tmp_path, "nvidia-smi", "exec sleep 5")
    assert nvidia.devices().unread == ("nvidia-smi did not answer within 0 s",)
