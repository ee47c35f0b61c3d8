"""The console's page in headless Chromium, against a router with a scripted engine."""

import asyncio
import shutil
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from playwright.async_api import Page, async_playwright, expect
from ullage_testing.fake_engine import BLOCK_BYTES

if TYPE_CHECKING:
    Service = Any
    StartService = Any

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
CHROMIUM = shutil.which("chromium")
WAIT_MS = 20_000.0

expect.set_options(timeout=WAIT_MS)


@pytest.mark.skipif(not CHROMIUM, reason="no chromium: apt-get install chromium")
async def test_a_newcomer_sees_headroom_an_answer_and_refusals(
    start_service: "StartService",
) -> None:
    routing = {"queue": {"max_requests": 4, "timeout": 3.0}}
    async with (
        start_service(
            single=(1000,), max_model_len=20_000, console={"local": True}, routing=routing
        ) as service,
        async_playwright() as playwright,
    ):
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = await browser.new_page()
        said: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        hosts: set[str] = set()
        page.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))

        url = f"http://127.0.0.1:{service.router.http_port}"
        await page.goto(f"{url}/console")
        await sees_headroom(page, service)
        await sees_an_answer(page)
        assert not said
        await sees_refusals(page, service)
        # What Chromium itself says of answers with these statuses.
        assert all("429" in text for text in said), said
        assert hosts == {urlsplit(url).netloc}, "no request leaves the origin"
        await fits_a_phone(page)
        await browser.close()


async def sees_headroom(page: Page, service: "Service") -> None:
    pool = 1000 * BLOCK_BYTES
    service.engine.push(
        kv_free_bytes=pool // 2,
        kv_reclaimable_bytes=pool // 4,
        kv_committed_bytes=pool // 8,
        headroom_bytes=pool * 5 // 8,
        pressure_level=2,
        requests_running=3,
    )
    engine = page.locator(".engine")
    await expect(engine.locator(".name")).to_have_text("single-0")
    await expect(engine).to_contain_text("pressure 2")
    await expect(engine).to_contain_text("running 3")
    for part, share in (("used", "25%"), ("committed", "12.5%"), ("reclaimable", "25%")):
        await expect(engine.locator(f".bar .{part}")).to_have_attribute("style", f"width: {share};")
    await expect(page.locator("#headroom")).to_have_text("63 %")
    await expect(page.locator("#link")).to_have_text("live")


async def sees_an_answer(page: Page) -> None:
    await page.fill("#text", "Hi <b>there</b>")
    await page.press("#text", "Enter")
    answer = page.locator(".said.answer")
    await expect(answer.locator(".text")).to_have_text("Hello big world")
    await expect(page.locator(".said.user .text")).to_have_text("Hi <b>there</b>")
    await expect(answer.locator(".meta")).to_contain_text("single-0")
    await expect(answer.locator(".meta .pill")).to_have_text("accept")
    trace = await answer.locator(".trace").inner_text()
    request_id = trace.removeprefix("ullage trace ")
    row = page.locator("#decisions tr").filter(has_text=request_id)
    await expect(row).to_contain_text("FITS")
    await row.locator(".more").click()
    story = page.locator("tr.detail li")
    await expect(story.first).to_contain_text("tokenised")
    await expect(story.last).to_contain_text("finished")
    await row.locator(".more").click()


async def sees_refusals(page: Page, service: "Service") -> None:
    service.engine.push(headroom_bytes=500)
    await expect(page.locator(".engine")).to_contain_text("500 B headroom")
    await page.fill("#text", "Hi again")
    await page.press("#text", "Enter")
    refused = page.locator(".said.refused")
    await expect(refused.locator(".pill.reject").first).to_have_text("429 QUEUE_TIMEOUT")
    await expect(refused).to_contain_text("Retry-After")
    await page.fill("#count", "20")
    await page.click("#overload button")
    await expect(page.locator("#tally-text")).to_contain_text("20 refused with 429")
    await expect(page.locator("#tally-text")).to_contain_text("16 QUEUE_FULL, 4 QUEUE_TIMEOUT")
    await page.click("text=Refused >> visible=true")
    row = page.locator("#decisions tr.refused").first
    await expect(row).to_contain_text("500 B available")
    await expect(row).to_contain_text("retry in")


async def fits_a_phone(page: Page) -> None:
    await page.set_viewport_size({"width": 390, "height": 844})
    await asyncio.wait_for(page.locator("#ask").scroll_into_view_if_needed(), WAIT_MS)
    width = await page.evaluate("document.documentElement.scrollWidth")
    assert width == 390, "nothing is wider than the screen"
